"""Logins of registries by reference, and the auth file that has no name on any disk."""

import json
import os
from pathlib import Path

import pytest
from libdsec.errors import NotFoundError, UsageError
from libdsec.secret import SecretRef

from nomad_dsec.cli.sandbox_secrets import secrets_of
from nomad_dsec.cluster.registry_logins import auth_file, login_for, parse_logins, registries_of
from nomad_dsec.cluster.secrets import SecretSource


@pytest.mark.parametrize(
    ("image", "most", "last"),
    [
        ("ghcr.io/team/app:v1", "ghcr.io/team/app", "ghcr.io"),
        ("localhost:5000/app@sha256:aa", "localhost:5000/app", "localhost:5000"),
        ("127.0.0.1:5000/app", "127.0.0.1:5000/app", "127.0.0.1:5000"),
        ("debian", "docker.io/library/debian", "docker.io"),
        ("team/app:1", "docker.io/team/app", "docker.io"),
    ],
)
def test_where_a_login_may_be_filed(image, most, last):
    found = registries_of(image)
    assert (found[0], found[-1]) == (most, last)


async def test_the_nearest_login_is_read_and_no_other():
    source = SecretSource(environ={"TEAM": "me:pa:ss", "BAD": "no-colon"})
    rows = ["ghcr.io=env:NOT_SET", "ghcr.io/team=env:TEAM", "quay.io=env:BAD"]
    assert await login_for("ghcr.io/team/app:v1", rows, source) == {"ghcr.io/team": "me:pa:ss"}
    assert await login_for("docker.io/x", rows, source) == {}
    with pytest.raises(NotFoundError) as missing:
        await login_for("ghcr.io/other/app", rows, source)
    assert missing.value.field == "registry.logins"
    with pytest.raises(UsageError, match="no user:password") as bad:
        await login_for("quay.io/x", rows, source)
    assert "no-colon" not in str(bad.value)


@pytest.mark.parametrize("row", ["ghcr.io", "=env:X", "ghcr.io=hunter2", "gh cr=env:X"])
def test_rows_that_are_no_reference(row):
    with pytest.raises(UsageError) as caught:
        parse_logins([row])
    assert caught.value.field == "registry.logins"
    assert "hunter2" not in str(caught.value)


def test_a_registry_twice():
    with pytest.raises(UsageError, match="twice"):
        parse_logins(["a.io=env:X", "a.io=env:Y"])


def test_the_auth_file_is_in_memory_and_gone_after():
    with auth_file({"ghcr.io": "me:pass"}) as path:
        assert json.loads(Path(path).read_text()) == {"auths": {"ghcr.io": {"auth": "bWU6cGFzcw=="}}}
        assert os.readlink(path).startswith("/memfd:")
        assert Path(path).stat().st_mode & 0o777 == 0o600
    assert not Path(path).exists()
    with auth_file({}) as nothing:
        assert nothing == ""


async def test_secrets_of_the_command_line(tmp_path, monkeypatch):
    file = tmp_path / "key"
    file.write_text("from a file\n")
    file.chmod(0o600)
    monkeypatch.setenv("DSEC_TEST_KEY", "from the environment")
    assert await secrets_of([f"a=file:{file}", "b=env:DSEC_TEST_KEY", "c=ref:hub#token"]) == {
        "a": "from a file",
        "b": "from the environment",
        "c": SecretRef("hub#token"),
    }


@pytest.mark.parametrize("text", ["name", "name=hunter2", "=file:/x", "name=vault:secret/x#k", "name=file:"])
async def test_a_value_on_the_command_line_is_refused_and_not_repeated(text):
    with pytest.raises(UsageError) as caught:
        await secrets_of([text])
    assert caught.value.field == "--secret"
    assert "hunter2" not in str(caught.value)
