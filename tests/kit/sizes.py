"""How large a case of the field is tried: small in an ordinary run, the field's own size with DSEC_LONG=1."""

from __future__ import annotations

import os
from typing import TypeVar

LONG = os.environ.get("DSEC_LONG", "") not in ("", "0")
_T = TypeVar("_T")


def sized(full: _T, small: _T) -> _T:
    """`full` with DSEC_LONG=1, else `small`."""
    return full if LONG else small
