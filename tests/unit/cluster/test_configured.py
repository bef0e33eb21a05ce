"""From settings to Consul, Nomad and Vault: addresses, TLS files, tokens by reference, what is told to others."""

from __future__ import annotations

import pytest
from libdsec.errors import DsecError, UsageError

from nomad_dsec import config
from nomad_dsec.cluster.configured import advertised, check_consul, endpoint_of, tls_of
from nomad_dsec.cluster.secrets import SecretSource
from nomad_dsec.gateway.endpoints import node_url


def settings(**flags):
    return config.load(env={}, flags={name.replace("__", "."): value for name, value in flags.items()})


async def test_off_by_default_and_tokens_by_reference():
    source = SecretSource(environ={"T": "a-token"})
    assert [await endpoint_of(settings(), name, source) for name in ("consul", "nomad", "vault")] == [None] * 3
    made = await endpoint_of(settings(consul__address="https://c.example", consul__token="env:T"), "consul", source)
    assert (made.url, made.token) == ("https://c.example:8500", "a-token")
    assert "a-token" not in repr(made)
    plain = await endpoint_of(settings(nomad__address="h:1", nomad__token="plain"), "nomad", source)
    assert (plain.url, plain.token) == ("http://h:1", "plain")


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ({"consul__address": "ftp://x"}, "consul.address"),
        ({"consul__address": "h", "consul__token": "env:NOT_THERE"}, "consul.token"),
        ({"consul__address": "h", "consul__ca_file": "/not/there"}, "consul.ca_file"),
        ({"consul__address": "h", "node__host": "0.0.0.0"}, "node.advertise"),
        ({"consul__address": "h", "node__advertise": "a/b"}, "node.advertise"),
    ],
)
async def test_what_is_wrong_is_named_before_a_daemon_makes_anything(flags, field):
    with pytest.raises(DsecError) as caught:
        await check_consul(settings(**flags), "node")
    assert caught.value.field == field


def test_a_certificate_and_its_key_go_together(tmp_path):
    (tmp_path / "cert.pem").touch()
    with pytest.raises(UsageError) as caught:
        tls_of(settings(vault__cert_file=str(tmp_path / "cert.pem")), "vault")
    assert caught.value.field == "vault.key_file"


@pytest.mark.parametrize(
    ("flags", "listens", "told"),
    [
        ({}, "http://127.0.0.1:4000", ("127.0.0.1", 4000)),
        ({"node__advertise": "10.0.0.7"}, "http://0.0.0.0:4000", ("10.0.0.7", 4000)),
        ({"node__advertise": "n7.example:80"}, "http://0.0.0.0:4000", ("n7.example", 80)),
        ({"node__advertise": "fd00::7"}, "http://[::]:4000", ("fd00::7", 4000)),
        ({"node__advertise": "[fd00::7]:80"}, "http://[::]:4000", ("fd00::7", 80)),
        ({"node__host": "::1", "node__port": 9}, "", ("::1", 9)),
    ],
)
def test_what_others_are_told(flags, listens, told):
    assert advertised(settings(**flags), "node", listens) == told


def test_urls_of_nodes():
    assert node_url("10.0.0.7", 80) == "http://10.0.0.7:80"
    assert node_url("fd00::7", 80) == "http://[fd00::7]:80"
    for host, port in (("", 80), ("a b", 80), ("x/y", 80), ("u@h", 80), ("h", 0), ("h", 65_536), ("a" * 300, 80)):
        with pytest.raises(ValueError):
            node_url(host, port)


def test_flags_of_shared_sections_carry_their_name():
    assert config.BY_KEY["consul.ttl_s"].flag == "--consul-ttl-s"
    assert config.BY_KEY["log.level"].flag == "--log-level"
    assert config.BY_KEY["node.advertise"].flag == "--advertise"
    assert all(config.BY_KEY[f"{name}.token"].secret for name in ("consul", "nomad", "vault", "node"))
    assert config.BY_KEY["gateway.node_token"].secret
