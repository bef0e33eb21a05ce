"""A real Consul that speaks HTTPS and wants a certificate of its callers."""

from __future__ import annotations

import pytest
from libdsec.errors import PlatformError, UsageError

from nomad_dsec import config
from nomad_dsec.cluster.configured import consul_endpoint
from nomad_dsec.cluster.consul import ConsulClient
from tests.kit.abilities import needs
from tests.kit.certificates import make_ca, make_pair
from tests.kit.consul import agent, free_ports

pytestmark = needs("consul", "openssl")


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    """(port, directory of certificates)."""
    directory = tmp_path_factory.mktemp("certificates")
    ca = make_ca(directory)
    cert, key = make_pair(ca, "server")
    make_pair(ca, "client")
    make_ca(directory / "strange")
    (port,) = free_ports(1)
    files = {"ca_file": str(ca), "cert_file": str(cert), "key_file": str(key), "verify_incoming_https": True}
    with agent(tmp_path_factory.mktemp("consul"), https=port, more=files):
        yield port, directory


async def leader(tls, **files) -> str:
    port, directory = tls
    flags = {f"consul.{name}": str(directory / path) if isinstance(path, str) else path for name, path in files.items()}
    settings = config.load(env={}, flags={"consul.address": f"https://127.0.0.1:{port}", **flags})
    client = ConsulClient(await consul_endpoint(settings))
    try:
        return await client.leader()
    finally:
        await client.close()


PAIR = {"cert_file": "client.pem", "key_file": "client.key"}


async def test_with_its_authority_and_a_certificate(tls) -> None:
    assert await leader(tls, ca_file="ca.pem", **PAIR)
    assert await leader(tls, verify=False, **PAIR)  # trusts anybody, and still shows its own certificate


@pytest.mark.parametrize(
    "files", [PAIR, {"ca_file": "ca.pem"}, {"ca_file": "strange/ca.pem", **PAIR}], ids=["no ca", "no pair", "wrong ca"]
)
async def test_without_them_nothing_is_told(tls, files) -> None:
    with pytest.raises(PlatformError) as caught:
        await leader(tls, **files)
    assert caught.value.code == "consul_unreachable"


async def test_files_that_are_no_certificates_are_named(tls) -> None:
    with pytest.raises(UsageError, match="TLS files"):
        await leader(tls, ca_file="client.ext")
