"""`--secret NAME=WHERE` of `dsec sandbox create`: a value is never an argument, which anybody on a machine can list."""

from __future__ import annotations

from typing import TYPE_CHECKING

from libdsec.errors import UsageError
from libdsec.secret import SecretRef

from nomad_dsec.cluster.secrets import SecretSource

if TYPE_CHECKING:
    import argparse

FLAG = "--secret"


def add_secret_flag(parser: argparse.ArgumentParser) -> None:
    """Give the parser the flag."""
    parser.add_argument(
        FLAG,
        action="append",
        default=[],
        metavar="NAME=WHERE",
        help="shown as /run/secrets/NAME; WHERE is file:PATH or env:NAME, read here, or ref:NAME, which the gateway "
        "looks up for the key's namespace; may repeat",
    )


async def secrets_of(texts: list[str]) -> dict[str, str | SecretRef]:
    """By file name. UsageError, NotFoundError, DeniedError name the flag, and quote no value."""
    source = SecretSource()
    found: dict[str, str | SecretRef] = {}
    for text in texts:
        name, _, where = text.partition("=")
        scheme, _, rest = where.partition(":")
        if not name or not rest or scheme not in ("file", "env", "ref"):
            hint = "write NAME=file:PATH, NAME=env:VARIABLE or NAME=ref:NAME"
            raise UsageError("bad_secret", f"{name[:80]}: no place of a secret is given", field=FLAG, hint=hint)
        found[name] = SecretRef(rest) if scheme == "ref" else str(await source.resolve(where, field=FLAG))
    return found
