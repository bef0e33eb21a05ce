"""How to reach Nomad, Consul and Vault: address, token, TLS. Values come from settings, files or the environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from libdsec.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Files of a client. verify false is for tests on one machine."""

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    verify: bool = True

    @property
    def client_pair(self) -> tuple[str, str] | None:
        """What requests calls `cert`."""
        return (self.cert_file, self.key_file) if self.cert_file else None

    @property
    def trust(self) -> bool | str:
        """What requests calls `verify`."""
        return (self.ca_file or True) if self.verify else False


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One server of the cluster. The token never shows in a repr."""

    scheme: str
    host: str
    port: int
    token: str = field(default="", repr=False)
    namespace: str = ""
    tls: Tls = field(default_factory=Tls)

    @property
    def url(self) -> str:
        """`http://host:port`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def parse_endpoint(address: str, *, default_port: int, token: str = "", tls: Tls | None = None, key: str) -> Endpoint:
    """From `http://host:port`, `https://host` or `host:port`; UsageError names the setting `key`."""
    parts = urlsplit(address if "://" in address else f"http://{address}")
    try:
        port = parts.port or default_port
    except ValueError as error:
        raise UsageError("bad_config", f"{address!r} has no usable port", field=key, hint="http://host:port") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise UsageError("bad_config", f"{address!r} is no address", field=key, hint="write http://host:port")
    return Endpoint(scheme=parts.scheme, host=parts.hostname, port=port, token=token, tls=tls or Tls())
