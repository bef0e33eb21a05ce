"""References to secrets: every way they can be wrong names the setting, and no error quotes a value."""

import os

import pytest
from libdsec.errors import DeniedError, DsecError, NotFoundError, UsageError
from libdsec.wire import CreateRequest

from nomad_dsec import config
from nomad_dsec.cluster.references import resolve_settings
from nomad_dsec.cluster.secrets import SECRET_BYTES, Secret, SecretSource
from nomad_dsec.gateway.secret_refs import NamespaceSecrets, check_root, open_namespace_secrets

VALUE = "hunter2-and-more"


def write(path, data: bytes = VALUE.encode() + b"\n", mode: int = 0o600):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)
    return path


async def test_a_secret_is_its_text_and_shows_nothing():
    found = await SecretSource(environ={"KEY": VALUE}).resolve("env:KEY", field="x")
    assert found == VALUE
    assert VALUE not in repr(found) + repr([found]) + f"{found!r}"
    assert type(str(found)) is str  # what goes on the wire is plain


async def test_a_file_is_read_without_its_last_newline(tmp_path):
    file = write(tmp_path / "key", b"two\nlines\n")
    assert await SecretSource().resolve(f"file:{file}", field="x") == "two\nlines"


@pytest.mark.parametrize(
    ("made", "kind", "code"),
    [
        (lambda path: None, NotFoundError, "no_such_secret"),
        (lambda path: write(path, mode=0o604), DeniedError, "open_secret_file"),
        (lambda path: write(path, b"\xff" + VALUE.encode()), UsageError, "bad_secret_file"),
        (lambda path: write(path, b"x" * (SECRET_BYTES + 1)), UsageError, "bad_secret_file"),
        (lambda path: path.mkdir(), UsageError, "bad_secret_file"),
    ],
)
async def test_files_that_will_not_do(tmp_path, made, kind, code):
    path = tmp_path / "key"
    made(path)
    with pytest.raises(kind) as caught:
        await SecretSource().resolve(f"file:{path}", field="node.token")
    assert caught.value.code == code
    assert VALUE not in str(caught.value)


async def test_a_fifo_is_refused_and_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(UsageError, match="no regular file"):
        await SecretSource().resolve(f"file:{tmp_path / 'fifo'}", field="x")


@pytest.mark.parametrize(
    "text", ["", "plain", "file:", "env:", "vault:", "vault:mount", "vault:mount/path", "http://x"]
)
async def test_what_is_no_reference(text):
    with pytest.raises(UsageError) as caught:
        await SecretSource(environ={}).resolve(text, field="node.token")
    assert (caught.value.code, caught.value.field) == ("bad_secret_reference", "node.token")


async def test_a_variable_that_is_not_set_and_a_vault_that_is_not_there():
    with pytest.raises(NotFoundError, match="has no MISSING"):
        await SecretSource(environ={}).resolve("env:MISSING", field="x")
    with pytest.raises(UsageError) as caught:
        await SecretSource().resolve("vault:secret/dsec#key", field="x")
    assert (caught.value.code, caught.value.hint) == ("no_vault", "set vault.address")


def test_the_daemons_own_secrets_are_read_at_the_start(tmp_path, monkeypatch):
    file = write(tmp_path / "token")
    monkeypatch.setenv("NODE_B", "b" * 24)
    settings = config.load(
        env={},
        flags={
            "node.token": f"file:{file}",
            "gateway.admin_key": "env:NODE_B",
            "gateway.nodes": [f"http://10.0.0.1:8643#file:{file}", "unix:/run/n.sock", "http://10.0.0.2:8643#plain"],
        },
    )
    assert resolve_settings(settings, "node")["node.token"] == VALUE
    found = resolve_settings(settings, "gateway")
    assert found["gateway.admin_key"] == "b" * 24
    assert found["gateway.nodes"] == [
        f"http://10.0.0.1:8643#{VALUE}", "unix:/run/n.sock", "http://10.0.0.2:8643#plain",
    ]  # fmt: skip
    assert found.origins == settings.origins
    assert found["node.token"] == f"file:{file}"  # not a gateway's to read


def test_settings_without_references_stay_as_they_are():
    settings = config.load(env={}, flags={"node.token": "plain", "gateway.nodes": ["http://h:1#plain"]})
    assert resolve_settings(settings, "node") is settings
    assert resolve_settings(settings, "gateway") is settings


def test_a_reference_that_leads_nowhere_ends_the_start():
    settings = config.load(env={}, flags={"node.token": "env:DSEC_TEST_NOT_SET"})
    with pytest.raises(NotFoundError) as caught:
        resolve_settings(settings, "node")
    assert caught.value.field == "node.token"


def request(**more) -> CreateRequest:
    return CreateRequest(image="base", **more)


@pytest.fixture
def kept(tmp_path):
    write(tmp_path / "team-a/hub")
    write(tmp_path / "team-b/hub", b"of team b")
    write(tmp_path / "team-a/deep/er")
    return NamespaceSecrets(SecretSource(), f"file:{tmp_path}/")


async def test_references_are_looked_up_in_the_callers_own_namespace(kept):
    asked = request(secret_refs={"hub_token": "hub", "again": "hub", "deep": "deep/er"}, secrets={"plain": "p"})
    filled = await kept.fill("team-a", asked)
    assert filled.secrets == {"plain": "p", "hub_token": VALUE, "again": VALUE, "deep": VALUE}
    assert filled.secret_refs == {}
    assert all(type(value) is str for value in filled.secrets.values())
    assert asked.secret_refs
    assert VALUE not in repr(filled)
    assert (await kept.fill("team-b", request(secret_refs={"x": "hub"}))).secrets == {"x": "of team b"}


@pytest.mark.parametrize(
    "ref", ["../team-b/hub", "a/../../team-b/hub", ".hidden", "a//b", "/etc/shadow", "hub\n", "a b"]
)
async def test_no_reference_leads_out_of_the_namespace(kept, ref):
    with pytest.raises(UsageError) as caught:
        await kept.fill("team-a", request(secret_refs={"x": ref}))
    assert (caught.value.code, caught.value.field) == ("bad_secret_reference", "secret_refs.x")


async def test_refusals_name_the_reference_and_not_the_operators_place(kept, tmp_path):
    for ref in ("other", "deep"):
        with pytest.raises(DsecError) as caught:
            await kept.fill("team-a", request(secret_refs={"x": ref}))
        assert VALUE not in str(caught.value)
    with pytest.raises(NotFoundError, match="namespace team-c has no secret 'hub'") as missing:
        await kept.fill("team-c", request(secret_refs={"x": "hub"}))
    assert str(tmp_path) not in str(missing.value)
    write(tmp_path / "team-a/open", mode=0o644)
    with pytest.raises(DeniedError, match="may not read 'open'") as denied:
        await kept.fill("team-a", request(secret_refs={"x": "open"}))
    assert str(tmp_path) not in str(denied.value)
    with pytest.raises(UsageError, match="by value and by reference"):
        await kept.fill("team-a", request(secret_refs={"x": "hub"}, secrets={"x": "v"}))
    with pytest.raises(UsageError, match="not enough, or too much"):
        await kept.fill("team-a", request(secret_refs={"x": "hub#key"}))


@pytest.mark.parametrize("root", ["env:X", "file:relative", "vault:", "secret/dsec", ""])
def test_roots_that_will_not_do(root):
    with pytest.raises(UsageError) as caught:
        check_root(root)
    assert caught.value.field == "gateway.sandbox_secrets"


async def test_a_root_in_vault_needs_a_vault():
    assert await open_namespace_secrets(config.load(env={})) is None
    with pytest.raises(UsageError, match="no Vault is configured"):
        await open_namespace_secrets(config.load(env={}, flags={"gateway.sandbox_secrets": "vault:secret/dsec"}))


def test_secret_is_text():
    assert isinstance(Secret("x"), str)
