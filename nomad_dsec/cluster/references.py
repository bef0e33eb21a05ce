"""A daemon's own secrets given by reference: its token, the admin's key, the tokens of nodes that are listed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from nomad_dsec.cluster.secrets import is_reference

if TYPE_CHECKING:
    from nomad_dsec.cluster.secrets import SecretSource
    from nomad_dsec.config import Settings, Value

OWN = {"node": ("node.token",), "gateway": ("gateway.admin_key",)}
ENDPOINTS = {"gateway": ("gateway.nodes",)}


def resolve_settings(settings: Settings, section: str) -> Settings:
    """The settings with what `section` gives by reference replaced by what it refers to; read once, at a start.

    Runs an event loop of its own, and only when there is a reference. Raises what SecretSource.resolve does, naming
    the setting; nothing of a secret is in an error.
    """
    own = [key for key in OWN.get(section, ()) if is_reference(settings[key])]
    lists = [key for key in ENDPOINTS.get(section, ()) if any(_reference_in(text) for text in settings[key])]
    if not own and not lists:
        return settings
    return asyncio.run(_resolved(settings, own, lists))


async def _resolved(settings: Settings, own: list[str], lists: list[str]) -> Settings:
    from nomad_dsec.cluster.configured import open_secrets  # brings Vault's client along: 10 MB and 0.1 s

    source = await open_secrets(settings)
    try:
        changed: dict[str, Value] = {key: await source.resolve(settings[key], field=key) for key in own}
        for key in lists:
            changed[key] = [await _endpoint(source, text, key) for text in settings[key]]
    finally:
        await source.close()
    return replace(settings, values={**settings.values, **changed})


def _reference_in(endpoint: str) -> str:
    """What stands for the token in `http://host:port#token`, when it is a reference."""
    token = endpoint.partition("#")[2]
    return token if is_reference(token) else ""


async def _endpoint(source: SecretSource, text: str, key: str) -> str:
    reference = _reference_in(text)
    if not reference:
        return text
    return f"{text.partition('#')[0]}#{await source.resolve(reference, field=key)}"
