"""Our client of Nomad against a server that speaks HTTPS, wants a certificate of its callers, and has ACLs."""

from __future__ import annotations

import json
import ssl
import subprocess
import time
import urllib.error
import urllib.request

import pytest
from libdsec.errors import DeniedError, PlatformError

from nomad_dsec import config
from nomad_dsec.cluster.configured import endpoint_of
from nomad_dsec.cluster.nomad import NomadClient
from nomad_dsec.cluster.secrets import SecretSource
from tests.kit.abilities import needs
from tests.kit.certificates import make_ca, make_pair
from tests.kit.consul import free_ports

pytestmark = [needs("nomad", "openssl"), pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(URL, directory of certificates, the management token)."""
    directory = tmp_path_factory.mktemp("tls")
    ca = make_ca(directory)
    cert, key = make_pair(ca, "server")
    make_pair(ca, "client")
    http, rpc, serf = free_ports(3)
    made = {
        "data_dir": str(directory / "data"),
        "bind_addr": "127.0.0.1",
        "advertise": dict.fromkeys(("http", "rpc", "serf"), "127.0.0.1"),
        "ports": {"http": http, "rpc": rpc, "serf": serf},
        "disable_update_check": True,
        "server": {"enabled": True, "bootstrap_expect": 1, "raft_multiplier": 1},
        "acl": {"enabled": True},
        "consul": {"auto_advertise": False, "server_auto_join": False, "client_auto_join": False},
        "tls": {"http": True, "ca_file": str(ca), "cert_file": str(cert), "key_file": str(key)}
        | {"verify_https_client": True},
    }
    (directory / "agent.json").write_text(json.dumps(made))
    argv = ["nomad", "agent", "-config", str(directory / "agent.json")]
    with (directory / "log").open("ab") as log:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    url = f"https://127.0.0.1:{http}"
    try:
        yield url, directory, _bootstrap(url, directory)
    finally:
        process.kill()
        process.wait(10)


def _bootstrap(url: str, directory) -> str:
    context = ssl.create_default_context(cafile=str(directory / "ca.pem"))
    context.load_cert_chain(directory / "client.pem", directory / "client.key")
    deadline = time.monotonic() + 60
    while True:
        request = urllib.request.Request(f"{url}/v1/acl/bootstrap", data=b"", method="POST")
        try:
            with urllib.request.urlopen(request, timeout=5, context=context) as reply:
                return json.load(reply)["SecretID"]
        except (urllib.error.URLError, OSError):
            assert time.monotonic() < deadline, (directory / "log").read_text()[-3000:]
            time.sleep(0.2)


async def version(server, token: str, **files) -> str:
    url, directory, _ = server
    flags = {f"nomad.{name}": str(directory / path) for name, path in files.items()}
    settings = config.load(env={}, flags={"nomad.address": url, "nomad.token": token, **flags})
    client = NomadClient(await endpoint_of(settings, "nomad", SecretSource(environ={})))
    try:
        return await client.version()
    finally:
        await client.close()


FILES = {"ca_file": "ca.pem", "cert_file": "client.pem", "key_file": "client.key"}


async def test_with_certificates_and_a_token(server):
    assert await version(server, server[2], **FILES)


async def test_what_is_missing_is_told_apart(server):
    with pytest.raises(DeniedError) as caught:
        await version(server, "", **FILES)
    assert "policies/acl" in caught.value.hint
    for missing in ("ca_file", "pair"):
        kept = {name: path for name, path in FILES.items() if (name == "ca_file") != (missing == "ca_file")}
        with pytest.raises(PlatformError) as caught:
            await version(server, server[2], **kept)
        assert caught.value.code == "nomad_unreachable"
