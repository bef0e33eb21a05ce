"""Where secrets come from: `file:/path`, `env:NAME` or `vault:mount/path#key`. Never in a log, an argv or a handle."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from libdsec.errors import DeniedError, NotFoundError, PlatformError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nomad_dsec.cluster.vault import VaultClient

SECRET_BYTES = 1024 * 1024
_REFERENCES = ("file:", "env:", "vault:")


def is_reference(text: str) -> bool:
    """Whether a setting says where the secret is, instead of being it."""
    return text.startswith(_REFERENCES)


class Secret(str):
    """Text that does not show itself in a repr, so that a log line or a traceback can't tell it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Secret(…)"


class SecretSource:
    """Resolves references; `vault` is None where none is configured."""

    def __init__(self, *, vault: VaultClient | None = None, environ: Mapping[str, str] | None = None) -> None:
        self._vault = vault
        self._environ = os.environ if environ is None else environ

    async def resolve(self, reference: str, *, field: str) -> Secret:
        """The secret; errors name the setting `field`, and never quote a value."""
        scheme, _, rest = reference.partition(":")
        if scheme == "file" and rest:
            return await asyncio.to_thread(_from_file, Path(rest), field)
        if scheme == "env" and rest:
            value = self._environ.get(rest)
            if value is None:
                raise NotFoundError("no_such_secret", f"the environment has no {rest}", field=field)
            return Secret(value)
        if scheme == "vault" and rest:
            return await self._from_vault(rest, field)
        raise UsageError(
            "bad_secret_reference",
            "a secret is given by reference",
            field=field,
            hint="write file:/path, env:NAME or vault:mount/path#key",
        )

    async def keep_forever(self) -> None:
        """Keep Vault's token alive; returns at once where there is no Vault."""
        if self._vault is not None:
            await self._vault.keep_token()

    async def close(self) -> None:
        """Close the connections to Vault."""
        if self._vault is not None:
            await self._vault.close()

    async def _from_vault(self, rest: str, field: str) -> Secret:
        where, _, key = rest.partition("#")
        mount, _, path = where.partition("/")
        if not (mount and path and key):
            raise UsageError("bad_secret_reference", f"vault:{where} is incomplete", field=field, hint="mount/path#key")
        if any(part in ("", ".", "..") for part in where.split("/")):  # HTTP clients resolve them, and land elsewhere
            raise UsageError(
                "bad_secret_reference", f"vault:{where} is no plain path", field=field, hint="mount/path#key"
            )
        if self._vault is None:
            raise UsageError("no_vault", "no Vault is configured", field=field, hint="set vault.address")
        values = await self._vault.read(mount, path)
        if key not in values:
            raise NotFoundError("no_such_secret", f"the secret {where} has no key {key}", field=field)
        return Secret(values[key])


def _from_file(path: Path, field: str) -> Secret:
    try:
        # a FIFO without a writer would block an open for ever
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            mode = os.fstat(fd).st_mode
            if not stat.S_ISREG(mode):
                raise UsageError("bad_secret_file", f"{path} is no regular file", field=field)
            if mode & 0o007:
                raise DeniedError("open_secret_file", f"{path} is open to everyone", field=field, hint="chmod 600")
            with open(fd, "rb", closefd=False) as file:
                data = file.read(SECRET_BYTES + 1)
        finally:
            os.close(fd)
    except FileNotFoundError as error:
        raise NotFoundError("no_such_secret", f"there is no file {path}", field=field) from error
    except OSError as error:
        raise PlatformError("secret_unreadable", f"{path} can't be read: {error.strerror}", field=field) from error
    if len(data) > SECRET_BYTES:
        raise UsageError("bad_secret_file", f"{path} is over {SECRET_BYTES} bytes", field=field)
    try:
        return Secret(data.decode("utf-8").removesuffix("\n"))
    except UnicodeDecodeError as error:
        raise UsageError("bad_secret_file", f"{path} is not UTF-8", field=field) from error
