"""A secret by name: the value stays with the operator, and never passes through this process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SecretRef:
    """What the operator keeps for this key's namespace: a file's name, or path#key in Vault.

    `Sandbox.create(..., secrets={"hf_token": SecretRef("hub#token")})` shows it as /run/secrets/hf_token.
    """

    name: str
