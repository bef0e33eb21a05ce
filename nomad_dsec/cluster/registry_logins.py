"""Logins of image registries: from references in the settings to an auth file that is in memory only.

The file is what skopeo(1) and others read, containers-auth.json(5). It has no name on any disk, and is gone with us.
"""

from __future__ import annotations

import base64
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec
from libdsec.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nomad_dsec.cluster.secrets import SecretSource

SETTING: Final = "registry.logins"


def parse_logins(rows: Sequence[str]) -> dict[str, str]:
    """Reference by registry, from `HOST[:PORT][/PATH]=REFERENCE`; UsageError quotes nothing but the host."""
    found: dict[str, str] = {}
    for row in rows:
        host, _, reference = row.partition("=")
        if not host or ":" not in reference or any(char.isspace() for char in host):
            hint = "write ghcr.io=file:/path, env:NAME or vault:mount/path#key"
            raise UsageError("bad_config", f"no reference is given for {host[:80]!r}", field=SETTING, hint=hint)
        if host in found:
            raise UsageError("bad_config", f"{host} is there twice", field=SETTING, hint="keep one")
        found[host] = reference
    return found


def registries_of(image: str) -> tuple[str, ...]:
    """What a login for this reference may be filed under, the longest first: host/path parts, then the host.

    A reference without a host is Docker Hub's, as containers-auth.json(5) and skopeo(1) have it.
    """
    name = image.partition("@")[0]
    host, slash, rest = name.partition("/")
    if not slash or not ("." in host or ":" in host or host == "localhost"):
        host, rest = "docker.io", name if slash else f"library/{name}"
    parts = rest.split("/")
    parts[-1] = parts[-1].partition(":")[0]
    return tuple("/".join([host, *parts[:count]]) for count in range(len(parts), -1, -1))


async def login_for(image: str, rows: Sequence[str], source: SecretSource) -> dict[str, str]:
    """{registry: "user:password"} for one image, or {}: only the login that is needed is read.

    Raises what SecretSource.resolve does; UsageError when the secret is no `user:password`.
    """
    logins = parse_logins(rows)
    for registry in registries_of(image):
        if registry in logins:
            value = str(await source.resolve(logins[registry], field=SETTING))
            user, colon, _ = value.partition(":")
            if not user or not colon:
                raise UsageError("bad_login", f"the login of {registry} is no user:password", field=SETTING)
            return {registry: value}
    return {}


@contextmanager
def auth_file(logins: Mapping[str, str]) -> Iterator[str]:
    """The path of an auth file for as long as the block runs; "" where there is no login.

    It is a memfd(2) of this process, so only our own user (and root) can open it, by procfs.
    """
    if not logins:
        yield ""
        return
    entries = {host: {"auth": base64.b64encode(text.encode()).decode("ascii")} for host, text in logins.items()}
    fd = os.memfd_create("auth", os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        with open(fd, "wb", closefd=False) as file:
            file.write(msgspec.json.encode({"auths": entries}))
        yield f"/proc/{os.getpid()}/fd/{fd}"
    finally:
        os.close(fd)
