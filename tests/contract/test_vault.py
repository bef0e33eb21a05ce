"""Vault's client on a server that fails on any request which the API's pages do not have, and on a real one."""

import asyncio
import subprocess
import threading
from dataclasses import replace

import pytest
from libdsec.errors import DeniedError, DsecError, NotFoundError, PlatformError, ProtocolError, UsageError

from nomad_dsec.cluster import vault as room
from nomad_dsec.cluster.secrets import SecretSource
from nomad_dsec.cluster.settings import Tls, parse_endpoint
from nomad_dsec.cluster.vault import Login, VaultClient
from tests.kit.abilities import needs
from tests.kit.strict_vault import StrictVault, strict_vault
from tests.kit.vault import dev_vault


@pytest.fixture(params=["strict", pytest.param("real", marks=needs("vault"))])
def vault(request, tmp_path):
    with strict_vault() if request.param == "strict" else dev_vault(tmp_path) as server:
        yield server


@pytest.fixture
def strict():
    with strict_vault() as server:
        yield server


def client(server, login: Login, *, tls: Tls | None = None, timeout_s: float = 10.0) -> VaultClient:
    endpoint = parse_endpoint(server.address, default_port=8200, tls=tls, key="vault.address")
    return VaultClient(endpoint, login, timeout_s=timeout_s)


async def test_the_newest_version_is_read_and_what_is_missing_is_told(vault):
    vault.put("secret/dsec/one", {"key": "old"})
    vault.put("secret/dsec/one", {"key": "new", "other": "value"})
    vault.put("secret/dsec/gone", {"key": "x"})
    vault.delete("secret/dsec/gone")
    vault.put("secret/dsec/number", {"key": 7})
    api = client(vault, Login(token=vault.new_token("secret/dsec/")))
    assert await api.read("secret", "dsec/one") == {"key": "new", "other": "value"}
    for path in ("dsec/gone", "dsec/never"):
        with pytest.raises(NotFoundError, match=f"no secret secret/{path}"):
            await api.read("secret", path)
    with pytest.raises(ProtocolError, match="secret/dsec/number is not text"):
        await api.read("secret", "dsec/number")
    await api.close()


async def test_a_policy_that_does_not_reach_is_a_denial_and_the_token_is_in_no_text(vault):
    vault.put("secret/other/one", {"key": "hunter2"})
    token = vault.new_token("secret/dsec/")
    api = client(vault, Login(token=token))
    with pytest.raises(DeniedError, match="Vault refused to read secret/other/one") as caught:
        await api.read("secret", "other/one")
    assert token not in repr(caught.value) + str(caught.value) + repr(Login(token=token))
    await api.close()


async def test_approle_logs_in_and_once_more_when_its_token_was_revoked(vault):
    vault.put("secret/dsec/one", {"key": "value"})
    role, secret = vault.new_approle("secret/dsec/")
    api = client(vault, Login(role_id=role, secret_id=secret))
    assert await api.read("secret", "dsec/one") == {"key": "value"}
    first = api._api.token
    vault.revoke(first)
    assert await api.read("secret", "dsec/one") == {"key": "value"}
    assert api._api.token != first
    await api.close()
    wrong = client(vault, Login(role_id=role, secret_id="hunter2-is-wrong"))
    with pytest.raises(DeniedError, match="refused the login") as caught:
        await wrong.read("secret", "dsec/one")
    assert caught.value.field == "vault.role_id"
    assert "hunter2" not in str(caught.value)
    await wrong.close()


async def test_a_workload_identity_is_read_anew_at_each_login(vault, tmp_path):
    vault.put("secret/dsec/one", {"key": "value"})
    file = tmp_path / "nomad_vault.jwt"
    file.write_text(vault.new_jwt("dsec", "secret/dsec/") + "\n")
    api = client(vault, Login(role="dsec", jwt_file=file))
    assert await api.read("secret", "dsec/one") == {"key": "value"}
    vault.revoke(api._api.token)
    file.write_text(vault.new_jwt("dsec", "secret/dsec/"))
    assert await api.read("secret", "dsec/one") == {"key": "value"}
    vault.revoke(api._api.token)
    file.write_text("eyJ.not.ours")
    with pytest.raises(DeniedError) as caught:
        await api.read("secret", "dsec/one")
    assert caught.value.field == "vault.jwt_file"
    file.unlink()
    with pytest.raises(UsageError, match=r"can't be read") as gone:
        await api.read("secret", "dsec/one")
    assert gone.value.field == "vault.jwt_file"
    await api.close()


async def test_a_token_file_that_was_written_anew_is_taken(vault, tmp_path):
    vault.put("secret/dsec/one", {"key": "value"})
    file = tmp_path / "vault_token"
    old = vault.new_token("secret/dsec/")
    file.write_text(old)
    api = client(vault, Login(token_file=file))
    assert await api.read("secret", "dsec/one") == {"key": "value"}
    vault.revoke(old)
    file.write_text(vault.new_token("secret/dsec/") + "\n")
    assert await api.read("secret", "dsec/one") == {"key": "value"}
    await api.close()


async def test_our_token_is_looked_up_and_renewed(vault):
    api = client(vault, Login(token=vault.new_token("secret/dsec/", ttl=3600)))
    facts = await api.lookup()
    assert facts.renewable
    assert 3500 < facts.ttl_s <= 3600
    assert (await api.renew()).ttl_s == 3600
    await api.close()
    fixed = client(vault, Login(token=vault.new_token("secret/dsec/", ttl=600, renewable=False)))
    assert not (await fixed.lookup()).renewable
    with pytest.raises(PlatformError):
        await fixed.renew()
    await fixed.close()


async def test_keeping_a_token_renews_it_and_lets_one_end_that_can_be_had_anew(strict: StrictVault):
    role, secret = strict.new_approle("secret/")
    api = client(strict, Login(role_id=role, secret_id=secret))
    assert await api._keep_once() == pytest.approx(3600 * room.RENEW_AT)
    token = strict.tokens[api._api.token]
    assert token.renewals == 1
    token.ttl = 5  # token_max_ttl is near: renewing gives no more
    assert await api._keep_once() == room.RETRY_S
    await api.lookup()
    assert [path for _, path in strict.requests].count("/v1/auth/approle/login") == 2
    await api.close()


async def test_a_token_of_the_environment_is_not_ours(strict: StrictVault, monkeypatch):
    monkeypatch.setenv("VAULT_TOKEN", "hvs.someone-elses")
    strict.put("secret/dsec/one", {"key": "value"})
    role, secret = strict.new_approle("secret/dsec/")
    api = client(strict, Login(role_id=role, secret_id=secret))
    assert await api.read("secret", "dsec/one") == {"key": "value"}  # the server takes no login with a token
    await api.close()


async def test_eight_readers_at_once_log_in_once(strict: StrictVault):
    strict.put("secret/dsec/one", {"key": "value"})
    role, secret = strict.new_approle("secret/dsec/")
    api = client(strict, Login(role_id=role, secret_id=secret))
    found = await asyncio.gather(*(api.read("secret", "dsec/one") for _ in range(8)))
    assert found == [{"key": "value"}] * 8
    assert [path for _, path in strict.requests].count("/v1/auth/approle/login") == 1
    await api.close()


async def test_a_namespace_goes_with_every_request(strict: StrictVault):
    strict.namespace = "team/a"
    strict.put("secret/dsec/one", {"key": "value"})
    role, secret = strict.new_approle("secret/dsec/")
    endpoint = parse_endpoint(strict.address, default_port=8200, key="vault.address")
    api = VaultClient(replace(endpoint, namespace="team/a"), Login(role_id=role, secret_id=secret))
    assert await api.read("secret", "dsec/one") == {"key": "value"}
    await api.close()


@pytest.mark.parametrize(
    ("answer", "code", "field"),
    [
        ((503, {"Content-Type": "application/json"}, b'{"errors":["Vault is sealed"]}'), "vault_sealed", ""),
        ((500, {}, b"oops"), "vault_unreachable", ""),
        ((429, {}, b"slow down"), "vault_unreachable", ""),
        ((307, {"Location": "http://127.0.0.1:9/v1/x"}, b""), "vault_redirect", "vault.address"),
        ((204, {}, b""), "vault_unreachable", ""),
        ((200, {"Content-Type": "application/json"}, b'{"data":{"key":"KV v1"}}'), "bad_vault_reply", ""),
        ((200, {"Content-Type": "application/json"}, b"[]"), "bad_vault_reply", ""),
    ],
)
async def test_every_odd_answer_is_an_error_of_its_own(strict: StrictVault, answer, code, field):
    strict.answer = answer
    api = client(strict, Login(token="hvs.hunter2"))
    with pytest.raises(DsecError) as caught:
        await api.read("secret", "dsec/one")
    assert (caught.value.code, caught.value.field) == (code, field)
    assert "hunter2" not in str(caught.value)
    assert len(strict.requests) == 1  # nothing is followed, nothing repeated
    await api.close()


async def test_a_server_that_hangs_or_is_away_costs_the_deadline_and_no_more(strict: StrictVault):
    strict.hold = threading.Event()
    api = client(strict, Login(token="hvs.x"), timeout_s=0.3)
    with pytest.raises(PlatformError, match="did not answer: ReadTimeout"):
        await api.read("secret", "dsec/one")
    strict.hold.set()
    await api.close()
    strict.requests.clear()
    away = VaultClient(parse_endpoint("http://127.0.0.1:9", default_port=8200, key="vault.address"), Login(token="x"))
    with pytest.raises(PlatformError, match="did not answer: ConnectionError") as caught:
        await away.read("secret", "dsec/one")
    assert caught.value.retry_after_s
    await away.close()


def openssl(*argv: str) -> None:
    subprocess.run(["openssl", *argv], check=True, capture_output=True, timeout=30)


def make_certificate(directory, name: str):
    """PEM of key and self-signed certificate for 127.0.0.1, and that of the certificate alone."""
    key, cert, both = (directory / f"{name}.{end}" for end in ("key", "crt", "pem"))
    openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
        "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert),
    )  # fmt: skip
    both.write_bytes(key.read_bytes() + cert.read_bytes())
    return both, cert, key


@needs("openssl")
async def test_tls_both_ways(tmp_path):
    server_pem, server_ca, _ = make_certificate(tmp_path, "server")
    _, client_cert, client_key = make_certificate(tmp_path, "client")
    with strict_vault(certificate=server_pem, client_ca=client_cert) as vault:
        vault.put("secret/dsec/one", {"key": "value"})
        login = Login(token=vault.new_token("secret/dsec/"))
        both = Tls(ca_file=str(server_ca), cert_file=str(client_cert), key_file=str(client_key))
        api = client(vault, login, tls=both)
        assert await api.read("secret", "dsec/one") == {"key": "value"}
        await api.close()
        for tls in (Tls(cert_file=str(client_cert), key_file=str(client_key)), Tls(ca_file=str(server_ca))):
            api = client(vault, login, tls=tls)
            with pytest.raises(PlatformError) as caught:
                await api.read("secret", "dsec/one")
            assert caught.value.code in ("vault_untrusted", "vault_unreachable")
            await api.close()
        assert len(vault.requests) == 1  # no request reached it over a connection that is not trusted


async def test_two_ways_to_log_in_are_one_too_many(strict: StrictVault):
    with pytest.raises(UsageError, match="more than one way") as caught:
        client(strict, Login(token="hvs.x", role_id="r", secret_id="s"))
    assert caught.value.field == "vault.role_id"
    none = client(strict, Login())
    with pytest.raises(DeniedError, match="no way to log in") as missing:
        await none.read("secret", "x")
    assert missing.value.field == "vault.token"
    await none.close()


@pytest.mark.parametrize("path", ["secret/../sys/raw#k", "secret/a//b#k", "secret/./a#k"])
async def test_a_reference_can_not_climb(strict: StrictVault, path):
    source = SecretSource(vault=client(strict, Login(token="hvs.x")))
    with pytest.raises(UsageError, match="no plain path"):
        await source.resolve(f"vault:{path}", field="node.token")
    assert strict.requests == []
    await source.close()


def test_the_strict_server_does_fail(tmp_path):
    import urllib.error
    import urllib.request

    with pytest.raises(AssertionError, match="LIST /v1/secret/metadata"), strict_vault() as server:
        headers = {"X-Vault-Request": "true", "X-Vault-Token": server.new_token("")}
        request = urllib.request.Request(f"{server.address}/v1/secret/metadata/x", headers=headers, method="LIST")
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(request, timeout=5)
