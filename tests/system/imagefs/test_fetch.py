"""Registries by skopeo and Docker engines by the docker SDK, against small servers on this machine."""

from __future__ import annotations

import base64
import json

import pytest
from dsec_imagefs import ImageError, ImageStore
from dsec_imagefs.sources.engine import probe_engine

from tests.kit.abilities import needs
from tests.kit.ocilayout import Layout, docker_archive
from tests.kit.registry import serve_engine, serve_registry
from tests.unit.imagefs.test_sources import EXPECTED, LAYERS, names_of


@pytest.fixture
def store(tmp_path):
    return ImageStore(tmp_path / "store")


@pytest.fixture
def layout(tmp_path):
    layout = Layout(tmp_path / "l")
    layout.image(LAYERS, tag="v1")
    return layout


def layer_digests(layout) -> list[str]:
    raw = (layout.path / "blobs" / layout.manifests[0]["digest"].replace(":", "/")).read_bytes()
    return [layer["digest"] for layer in json.loads(raw)["layers"]]


@needs("skopeo")
def test_an_image_comes_from_a_registry(store, layout):
    with serve_registry(layout.path) as registry:
        ref = f"docker://{registry.address}/team/demo:v1"
        image = store.import_image(ref, "demo")
    assert names_of(store, "demo") == EXPECTED
    assert image.source == ref
    assert image.config.cwd == "/work"
    assert image.rootfs == store.import_image(f"oci:{layout.path}").rootfs


@needs("skopeo")
@pytest.mark.parametrize("faults", [["redirect"], ["429"], ["500", "short"]])
def test_passing_faults_are_ridden_out(store, layout, faults):
    with serve_registry(layout.path) as registry:
        registry.faults[layer_digests(layout)[0]] = list(faults)
        store.import_image(f"docker://{registry.address}/demo:v1", "demo")
    assert names_of(store, "demo") == EXPECTED


@needs("skopeo")
@pytest.mark.parametrize("fault", ["corrupt", "short"])
def test_lasting_damage_is_an_error_and_leaves_nothing(store, layout, fault):
    with serve_registry(layout.path) as registry:
        registry.faults[layer_digests(layout)[1]] = [fault] * 50
        with pytest.raises(ImageError) as caught:
            store.import_image(f"docker://{registry.address}/demo:v1", "demo")
    assert caught.value.code in ("tool_failed", "bad_image")
    assert store.ls() == []
    assert list((store.root / "tmp").iterdir()) == []


@needs("skopeo")
def test_unknown_tags_say_so(store, layout):
    with serve_registry(layout.path) as registry, pytest.raises(ImageError, match=r"manifest unknown|reading manifest"):
        store.import_image(f"docker://{registry.address}/demo:v2")


@needs("skopeo")
def test_credentials_come_from_a_file(store, layout, tmp_path):
    secret = base64.b64encode(b"me:s3cret").decode()
    with serve_registry(layout.path) as registry:
        registry.authorization = f"Basic {secret}"
        authfile = tmp_path / "auth.json"
        authfile.write_text(json.dumps({"auths": {registry.address: {"auth": secret}}}))
        with pytest.raises(ImageError, match=r"unauthorized|authentication|401") as caught:
            store.import_image(f"docker://{registry.address}/demo:v1", "demo")
        assert "s3cret" not in str(caught.value)
        store.import_image(f"docker://{registry.address}/demo:v1", "demo", authfile=str(authfile))
    assert names_of(store, "demo") == EXPECTED


def test_an_image_comes_from_an_engine(store, tmp_path, monkeypatch):
    socket = tmp_path / "d.sock"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{socket}")
    with serve_engine(socket, {"demo:1": docker_archive(LAYERS, ["demo:1"])}):
        assert probe_engine() == ""
        image = store.import_image("docker-daemon:demo:1", "demo")
        assert names_of(store, "demo") == EXPECTED
        assert image.source == "docker-daemon:demo:1"
        with pytest.raises(ImageError) as caught:
            store.import_image("docker-daemon:other:1")
        assert caught.value.code == "not_found"


def test_no_engine_is_told_from_no_image(store, tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    assert probe_engine().startswith("no Docker engine")
    with pytest.raises(ImageError, match="Docker engine") as caught:
        store.import_image("docker-daemon:demo:1")
    assert caught.value.code == "tool_failed"
