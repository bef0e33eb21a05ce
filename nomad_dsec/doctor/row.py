"""One line of `dsec doctor`. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """`ok`: as it should be. `required`: without it containers don't start here; else something is slower or missing.

    reason: what was seen, also when ok. fix: what to do; "" when there is nothing to do or nothing can be done.
    """

    name: str
    ok: bool
    reason: str = ""
    fix: str = ""
    required: bool = False

    @property
    def mark(self) -> str:
        """`ok`, `FAIL` for what is required, `note` for the rest."""
        return "ok" if self.ok else "FAIL" if self.required else "note"
