"""`dsec image import` from a registry that wants a login, which is given by reference and is in memory only."""

from __future__ import annotations

import base64

import pytest

from nomad_dsec.cli import main as cli
from tests.kit.abilities import needs
from tests.kit.ocilayout import Layout
from tests.kit.registry import serve_registry
from tests.unit.imagefs.test_sources import LAYERS


@needs("skopeo")
def test_a_login_by_reference_opens_the_registry(tmp_path, monkeypatch, capsys):
    layout = Layout(tmp_path / "l")
    layout.image(LAYERS, tag="v1")
    monkeypatch.setenv("DSEC_TEST_LOGIN", "me:s3cret")
    monkeypatch.setenv("HOME", str(tmp_path))
    argv = ["image", "import", "--store", str(tmp_path / "store")]
    with serve_registry(layout.path) as registry:
        registry.authorization = "Basic " + base64.b64encode(b"me:s3cret").decode()
        ref = f"docker://{registry.address}/team/demo:v1"
        assert cli.main([*argv, ref, "demo"]) != 0  # the twin: without it the registry refuses
        monkeypatch.setenv("DSEC_REGISTRY_LOGINS", f"{registry.address}=env:DSEC_TEST_LOGIN")
        assert cli.main([*argv, ref, "demo"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("sha256:")
    assert "s3cret" not in out + err
    assert not any(b"s3cret" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert not list(tmp_path.rglob("auth*.json"))


@pytest.mark.parametrize("login", ["env:DSEC_TEST_NOT_SET", "hunter2"])
def test_a_login_that_leads_nowhere_names_the_setting(tmp_path, monkeypatch, capsys, login):
    monkeypatch.setenv("DSEC_REGISTRY_LOGINS", f"127.0.0.1:9={login}")
    assert cli.main(["image", "import", "--store", str(tmp_path / "s"), "docker://127.0.0.1:9/x:1", "x"]) != 0
    err = capsys.readouterr().err
    assert "registry.logins" in err
    assert "hunter2" not in err
