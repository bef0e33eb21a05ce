"""Secrets that creates name instead of bringing them: looked up below the caller's own namespace, and nowhere else.

The value goes into the one request to the node and is kept nowhere here: not in the flight, the journal or a log.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Final

import msgspec
from libdsec.errors import DeadlineExceeded, DeniedError, NotFoundError, UsageError
from libdsec.wire import REFERENCE_PATTERN

from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from libdsec.wire import CreateRequest

    from nomad_dsec.cluster.secrets import SecretSource
    from nomad_dsec.config import Settings

log = get_log(__name__)
SETTING: Final = "gateway.sandbox_secrets"
LOOKUP_S = 20.0
_REF = re.compile(REFERENCE_PATTERN)


class NamespaceSecrets:
    """root: `file:/directory` or `vault:mount/path`; a namespace's own secrets are below root/<namespace>."""

    def __init__(self, source: SecretSource, root: str) -> None:
        self._source = source
        self._root = check_root(root)

    async def fill(self, namespace: str, request: CreateRequest) -> CreateRequest:
        """The request with values for its references. NotFoundError, DeniedError, PlatformError name the reference."""
        wanted = request.secret_refs
        for name in wanted.keys() & request.secrets.keys():
            raise UsageError("secret_twice", f"{name[:80]} is given by value and by reference", field=_field(name))
        places = {ref: self._place(namespace, ref, name) for name, ref in wanted.items()}
        try:
            async with asyncio.timeout(LOOKUP_S):
                found = await asyncio.gather(*(self._resolve(namespace, *item) for item in places.items()))
        except TimeoutError as late:
            raise DeadlineExceeded("secrets_timeout", f"no answer within {LOOKUP_S:g} s", field="secret_refs") from late
        values = dict(zip(places, found, strict=True))
        log.info("secrets are handed in by reference", namespace=namespace, references=sorted(places))
        named = {name: values[ref] for name, ref in wanted.items()}
        return msgspec.structs.replace(request, secrets={**request.secrets, **named}, secret_refs={})

    def _place(self, namespace: str, ref: str, name: str) -> str:
        if _REF.fullmatch(ref) is None:
            raise UsageError("bad_secret_reference", "it can't be a name", field=_field(name), hint="name, or path#key")
        is_file, has_key = self._root.startswith("file:"), "#" in ref
        if is_file == has_key:
            hint = "name a file, without #key" if is_file else "write path#key"
            raise UsageError(
                "bad_secret_reference", f"{ref!r} is not enough, or too much", field=_field(name), hint=hint
            )
        return f"{self._root}/{namespace}/{ref}"

    async def _resolve(self, namespace: str, ref: str, place: str) -> str:
        try:
            return str(await self._source.resolve(place, field="secret_refs"))
        except NotFoundError as error:  # where the operator keeps them is not the caller's to know
            raise NotFoundError(
                "no_such_secret", f"namespace {namespace} has no secret {ref!r}", field="secret_refs"
            ) from error
        except DeniedError as error:
            log.error("a secret can't be read", namespace=namespace, reference=ref, error=str(error))
            raise DeniedError(
                "secret_denied", f"the gateway may not read {ref!r} of namespace {namespace}", field="secret_refs"
            ) from error

    async def keep_forever(self) -> None:
        """Keep the login alive."""
        await self._source.keep_forever()

    async def close(self) -> None:
        """Close the connections."""
        await self._source.close()


def check_root(root: str) -> str:
    """The root without a slash at its end; UsageError names the setting."""
    scheme, _, rest = root.rstrip("/").partition(":")
    if (scheme == "file" and rest.startswith("/")) or (scheme == "vault" and rest):
        return f"{scheme}:{rest}"
    hint = "write file:/directory or vault:mount/path"
    raise UsageError("bad_config", f"{root!r} is no place of secrets", field=SETTING, hint=hint)


def refuse(request: CreateRequest) -> UsageError:
    """The error of a gateway that looks nothing up."""
    name = next(iter(request.secret_refs))
    return UsageError(
        "no_secret_refs",
        "this gateway looks up no secrets",
        field=_field(name),
        hint=f"give the value itself, or let the operator set {SETTING}",
    )


async def open_namespace_secrets(settings: Settings) -> NamespaceSecrets | None:
    """From the settings; None where references are not allowed."""
    root = settings[SETTING]
    if not root:
        return None
    from nomad_dsec.cluster.configured import open_secrets  # with Vault's client, which others do not need

    root = check_root(root)
    if root.startswith("vault:") and not settings["vault.address"]:
        raise UsageError("no_vault", "no Vault is configured", field=SETTING, hint="set vault.address")
    return NamespaceSecrets(await open_secrets(settings), root)


def _field(name: str) -> str:
    return f"secret_refs.{name[:80]}"
