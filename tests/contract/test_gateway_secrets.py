"""Creates that name secrets: looked up in Vault for the caller's namespace, once a create, and kept in no file."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
from libdsec import AsyncClient, AsyncSandbox, SecretRef
from libdsec.errors import DeniedError, NotFoundError, PlatformError, UsageError

from nomad_dsec import config
from nomad_dsec.gateway.secret_refs import open_namespace_secrets
from tests.kit.abilities import needs
from tests.kit.fakenode import FakeNode
from tests.kit.gateways import calling, running_gateway, tenant_key
from tests.kit.strict_vault import strict_vault
from tests.kit.vault import dev_vault

VALUE = "hunter2-of-team-a"


@pytest.fixture(params=["strict", pytest.param("real", marks=needs("vault"))])
def vault(request, tmp_path):
    with strict_vault() if request.param == "strict" else dev_vault(tmp_path) as server:
        server.put("secret/dsec/sandboxes/team-a/hub", {"token": VALUE, "other": "x"})
        yield server


@pytest.fixture
async def node():
    async with FakeNode() as made:
        yield made


async def secrets_of(server, **more):
    role, secret = server.new_approle("secret/dsec/sandboxes/")
    flags = {
        "vault.address": server.address,
        "vault.role_id": role,
        "vault.secret_id": secret,
        "gateway.sandbox_secrets": "vault:secret/dsec/sandboxes",
    }
    return await open_namespace_secrets(config.load(env={}, flags=flags | more))


@asynccontextmanager
async def client_of(data, node, **options):
    """Of team-a, on a gateway of its own."""
    async with running_gateway(data, node, **options) as gateway, calling(gateway) as admin:
        key = await tenant_key(admin, "team-a")
        async with AsyncClient(gateway.address, key, reconnect_s=0.0) as client:
            yield client


async def test_the_node_gets_the_value_and_nothing_else_has_it(tmp_path, node, vault):
    looked_up = await secrets_of(vault)
    async with running_gateway(tmp_path / "gw", node, secrets=looked_up) as gateway, calling(gateway) as admin:
        key = await tenant_key(admin, "team-a")
        async with AsyncClient(gateway.address, key) as client:
            options = {"secrets": {"hub": SecretRef("hub#token"), "own": "mine"}, "idempotency_key": "k1"}
            made = await AsyncSandbox.create("debian:12", client=client, **options)
            again = await AsyncSandbox.create("debian:12", client=client, **options)
            assert again.id == made.id
            (asked,) = node.asked
            assert asked.spec.secrets == {"hub": VALUE, "own": "mine"}
            assert asked.spec.secret_refs == {}
            assert VALUE not in repr(asked)
            with pytest.raises(UsageError) as other:
                await AsyncSandbox.create("debian:12", client=client, **options | {"secrets": {"own": "not mine"}})
            assert other.value.code == "idempotency_mismatch"
            assert "mine" not in str(other.value)
    for file in (tmp_path / "gw").iterdir():
        assert VALUE.encode() not in file.read_bytes()


async def test_another_namespace_has_no_such_secret(tmp_path, node, vault):
    looked_up = await secrets_of(vault)
    async with running_gateway(tmp_path / "gw", node, secrets=looked_up) as gateway, calling(gateway) as admin:
        async with AsyncClient(gateway.address, await tenant_key(admin, "team-b")) as client:
            for ref in ("hub#token", "team-a/hub#token"):
                with pytest.raises(NotFoundError, match="namespace team-b has no secret") as caught:
                    await AsyncSandbox.create("debian:12", client=client, secrets={"x": SecretRef(ref)})
                assert "dsec/sandboxes" not in str(caught.value)
            with pytest.raises(UsageError):
                await AsyncSandbox.create("debian:12", client=client, secrets={"x": SecretRef("../team-a/hub#token")})
        async with AsyncClient(gateway.address, await tenant_key(admin, "team-a")) as client:
            with pytest.raises(NotFoundError, match="hub#nothing"):
                await AsyncSandbox.create("debian:12", client=client, secrets={"x": SecretRef("hub#nothing")})
    assert node.asked == []


async def test_a_gateway_that_looks_nothing_up_says_so(tmp_path, node):
    async with client_of(tmp_path / "gw", node) as client:
        with pytest.raises(UsageError, match="looks up no secrets") as caught:
            await AsyncSandbox.create("debian:12", client=client, secrets={"hub": SecretRef("hub#token")})
    assert caught.value.field == "secret_refs.hub"
    assert "gateway.sandbox_secrets" in caught.value.hint


async def test_a_vault_that_refuses_or_is_away_is_a_fault_of_the_platform(tmp_path, node):
    with strict_vault() as server:
        refused = await secrets_of(server, **{"vault.secret_id": "wrong"})
        async with client_of(tmp_path / "gw", node, secrets=refused) as client:
            with pytest.raises(DeniedError, match="may not read"):
                await AsyncSandbox.create("debian:12", client=client, secrets={"x": SecretRef("hub#token")})
    away = await secrets_of(server)
    async with client_of(tmp_path / "gw2", node, secrets=away) as client:
        with pytest.raises(PlatformError) as caught:
            await AsyncSandbox.create("debian:12", client=client, wait_s=1, secrets={"x": SecretRef("hub#token")})
    assert caught.value.code == "vault_unreachable"
