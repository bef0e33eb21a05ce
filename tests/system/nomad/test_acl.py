"""The access policies for Consul on a real agent with ACLs on: each is accepted and allows what it says, no more."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.kit.abilities import needs
from tests.kit.consul import agent

pytestmark = [needs("consul"), pytest.mark.timeout(120)]
POLICIES = Path(__file__).parents[3] / "policies/acl"


@pytest.fixture(scope="module")
def consul(tmp_path_factory):
    with agent(tmp_path_factory.mktemp("c"), acl=True) as made:
        yield made


def call(consul, method: str, path: str, body=None, token: str = "") -> tuple[int, object]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{consul.port}{path}",
        data=None if body is None else json.dumps(body).encode(),
        method=method,
        headers={"X-Consul-Token": token or consul.token},
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            raw = reply.read()
            return reply.status, json.loads(raw) if raw.strip() else None
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def token_for(consul, component: str) -> str:
    rules = (POLICIES / f"{component}.consul.hcl").read_text()
    status, policy = call(consul, "PUT", "/v1/acl/policy", {"Name": component, "Rules": rules})
    assert status == 200, policy
    status, token = call(consul, "PUT", "/v1/acl/token", {"Policies": [{"Name": component}]})
    assert status == 200, token
    return token["SecretID"]


def test_the_node_daemon_registers_itself_and_nobody_else(consul):
    token = token_for(consul, "node")
    for name, status in (("dsec-node", 200), ("dsec-sandbox-1", 200), ("vault", 403)):
        assert call(consul, "PUT", "/v1/agent/service/register", {"Name": name}, token)[0] == status, name
    status, session = call(consul, "PUT", "/v1/session/create", {"TTL": "10s"}, token)
    assert status == 200
    path = f"?acquire={session['ID']}"
    assert call(consul, "PUT", f"/v1/kv/dsec/nodes/n1{path}", {}, token)[0] == 200
    assert call(consul, "PUT", f"/v1/kv/other{path}", {}, token)[0] == 403
    assert call(consul, "GET", "/v1/acl/tokens", token=token)[0] == 403


def test_the_gateway_finds_nodes_and_registers_itself(consul):
    token = token_for(consul, "gateway")
    assert call(consul, "PUT", "/v1/agent/service/register", {"Name": "dsec-gateway"}, token)[0] == 200
    assert call(consul, "PUT", "/v1/agent/service/register", {"Name": "dsec-node"}, token)[0] == 403
    assert call(consul, "GET", "/v1/health/service/dsec-node", token=token)[0] == 200
    assert call(consul, "PUT", "/v1/kv/dsec/nodes/n1", {}, token)[0] == 403


def test_the_autoscaler_holds_its_lock_alone(consul):
    token = token_for(consul, "autoscaler")
    status, session = call(consul, "PUT", "/v1/session/create", {"TTL": "10s"}, token)
    assert status == 200
    path = f"/v1/kv/dsec/leader/autoscaler?acquire={session['ID']}"
    assert call(consul, "PUT", path, {}, token) == (200, True)
    assert call(consul, "PUT", "/v1/kv/dsec/nodes/n1", {}, token)[0] == 403
