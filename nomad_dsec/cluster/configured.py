"""From settings to clients of Consul, Nomad and Vault: addresses, TLS files, and tokens by reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from libdsec.errors import UsageError

from nomad_dsec.cluster.secrets import SecretSource, is_reference
from nomad_dsec.cluster.settings import Endpoint, Tls, parse_endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nomad_dsec.cluster.vault import Login
    from nomad_dsec.config import Settings

DEFAULT_PORTS = {"consul": 8500, "nomad": 4646, "vault": 8200}
EVERYWHERE = ("", "0.0.0.0", "::")  # noqa: S104 - listened on, never told to others


async def resolve(source: SecretSource, text: str, *, field: str) -> str:
    """The secret itself when `text` is a reference, else `text`. Raises what SecretSource.resolve does."""
    return await source.resolve(text, field=field) if is_reference(text) else text


async def endpoint_of(settings: Settings, section: str, source: SecretSource) -> Endpoint | None:
    """How to reach the server of this section, None when its address is empty.

    UsageError names the setting; NotFoundError, DeniedError when its token can't be had.
    """
    address = settings[f"{section}.address"]
    if not address:
        return None
    token = await resolve(source, settings[f"{section}.token"], field=f"{section}.token")
    return parse_endpoint(
        address,
        default_port=DEFAULT_PORTS[section],
        token=token,
        tls=tls_of(settings, section),
        key=f"{section}.address",
    )


def tls_of(settings: Settings, section: str) -> Tls:
    """The TLS files of a section; UsageError names one that is not there, or a pair of which one half is missing."""
    paths = {name: settings[f"{section}.{name}"] for name in ("ca_file", "cert_file", "key_file")}
    for name, path in paths.items():
        if path and not Path(path).is_file():
            raise UsageError("bad_config", f"there is no file {path}", field=f"{section}.{name}", hint="check the path")
    if bool(paths["cert_file"]) != bool(paths["key_file"]):
        missing = "key_file" if paths["cert_file"] else "cert_file"
        raise UsageError(
            "bad_config", "a certificate and its key go together", field=f"{section}.{missing}", hint="set both"
        )
    return Tls(**paths, verify=settings[f"{section}.verify"])


async def open_secrets(settings: Settings, *, environ: Mapping[str, str] | None = None) -> SecretSource:
    """The source of secrets, with Vault where it is configured. Vault's own credentials are files or environment.

    Close its Vault client by `close()` when done.
    """
    plain = SecretSource(environ=environ)
    endpoint = await endpoint_of(settings, "vault", plain)
    if endpoint is None:
        return plain
    from nomad_dsec.cluster.vault import VaultClient  # brings hvac along: 10 MB and 0.1 s, where there is a Vault

    endpoint = replace(endpoint, namespace=settings["vault.namespace"])
    return SecretSource(vault=VaultClient(endpoint, await _login_of(settings, endpoint, plain)), environ=environ)


async def consul_endpoint(settings: Settings) -> Endpoint:
    """The Consul agent; its address must be set. Raises as endpoint_of does."""
    source = await open_secrets(settings)
    try:
        endpoint = await endpoint_of(settings, "consul", source)
    finally:
        await source.close()
    assert endpoint is not None
    return endpoint


async def check_consul(settings: Settings, section: str) -> None:
    """At a daemon's start, before anything is made: what it needs to be in Consul, if it is to be there."""
    if settings["consul.address"]:
        await consul_endpoint(settings)
        advertised(settings, section)


async def _login_of(settings: Settings, endpoint: Endpoint, plain: SecretSource) -> Login:
    from nomad_dsec.cluster.vault import Login

    jwt_file, token = settings["vault.jwt_file"], settings["vault.token"]
    token_file = Path(token.removeprefix("file:")) if token.startswith("file:") else None
    return Login(
        token="" if token_file is not None else endpoint.token,
        token_file=token_file,
        role_id=settings["vault.role_id"],
        secret_id=await resolve(plain, settings["vault.secret_id"], field="vault.secret_id"),
        role=settings["vault.role"],
        jwt_file=Path(jwt_file) if jwt_file else None,
        jwt_mount=settings["vault.jwt_mount"],
    )


def advertised(settings: Settings, section: str, address: str = "") -> tuple[str, int]:
    """Host and port that Consul tells others: `<section>.advertise`, else where it listens.

    address: `http://host:port` once it listens; before that the port may be 0. UsageError names the setting.
    """
    key = f"{section}.advertise"
    listens = urlsplit(address or _url(settings[f"{section}.host"], settings[f"{section}.port"]))
    host, port = listens.hostname or "", listens.port or 0
    if settings[key]:
        given = parse_endpoint(_url_text(settings[key]), default_port=port, key=key)
        host, port = given.host, given.port
    if host in EVERYWHERE:
        raise UsageError(
            "bad_config",
            f"{host or 'nothing'} is no address that others reach us by",
            field=key,
            hint=f"set {key} to this machine's address, or {section}.host",
        )
    return host, port


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _url_text(text: str) -> str:
    bare_ipv6 = text.count(":") > 1 and not text.startswith("[")
    return f"http://[{text}]" if bare_ipv6 else f"http://{text}"
