"""What the doctor says of a real Consul: reached or not, and what a token is enough for. Nomad's rows: test_dev.py."""

from __future__ import annotations

import pytest

from nomad_dsec import config
from nomad_dsec.cluster.rights import RIGHTS
from nomad_dsec.doctor.cluster import check_consul, check_nomad
from tests.kit.abilities import needs
from tests.kit.consul import agent, free_ports

pytestmark = needs("consul")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with agent(tmp_path_factory.mktemp("consul"), acl=True) as one:
        one.token_of("node")  # when this is given, ACLs stand
        yield one


def rows(address: str, token: str = "", **more):
    settings = config.load(env={}, flags={"consul.address": address, "consul.token": token, **more})
    return {row.name: row for row in check_consul(settings)}


@pytest.mark.parametrize("component", RIGHTS)
def test_the_policy_of_a_component_is_enough_for_it_and_for_no_other(server, component) -> None:
    found = rows(f"127.0.0.1:{server.port}", server.token_of(component))
    assert found["consul"].ok
    assert (found["consul token"].ok, found["consul token"].reason) == (True, f"enough for: {component}")


def test_a_token_that_is_not_enough_says_what_lacks(server) -> None:
    token = server.token_of("autoscaler")
    row = rows(f"127.0.0.1:{server.port}", token)["consul token"]
    assert not row.ok
    assert "node lacks write service dsec-node" in row.reason
    assert "gateway lacks write service dsec-gateway" in row.reason
    assert "policies/acl" in row.fix
    assert token not in row.reason


def test_the_operator_sees_the_version(server) -> None:
    found = rows(f"127.0.0.1:{server.port}", server.token)
    assert "led by" in found["consul"].reason
    assert found["consul token"].reason == "enough for: node, gateway"


def test_where_nothing_answers_or_a_file_is_missing_the_row_says_so(tmp_path) -> None:
    (port,) = free_ports(1)
    row = rows(f"127.0.0.1:{port}")["consul"]
    assert not row.ok
    assert row.fix
    row = rows("127.0.0.1:1", f"file:{tmp_path}/none")["consul"]
    assert f"{tmp_path}/none" in row.reason
    row = rows("127.0.0.1:1", **{"consul.ca_file": f"{tmp_path}/ca.pem"})["consul"]
    assert "consul.ca_file" in row.reason


def test_what_is_not_configured_has_no_row() -> None:
    settings = config.load(env={}, flags={})
    assert check_consul(settings) == []
    assert check_nomad(settings) == []
