"""The label by which a sandbox asks to be a service of its own in Consul: `consul_service`, NAME or NAME:PORT."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from libdsec.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

LABEL = "consul_service"
PORT_MAX = 65_535
# The service is dsec-sandbox-NAME, which DNS takes up to 63 characters of (RFC 1035, 2.3.4).
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,48}[A-Za-z0-9])?")
_PORT = re.compile(r"[0-9]{1,5}")


def asked_service(labels: Mapping[str, str]) -> tuple[str, int] | None:
    """(name, port; 0 where none is given), or None without the label. UsageError bad_label: it is neither form."""
    text = labels.get(LABEL)
    if text is None:
        return None
    name, colon, port = text.partition(":")
    if _NAME.fullmatch(name) is None:
        raise _bad(text, "NAME is 1-50 letters, digits and inner hyphens")
    if not colon:
        return name, 0
    if _PORT.fullmatch(port) is None or not 0 < int(port) <= PORT_MAX:
        raise _bad(text, f"PORT is a number of 1 to {PORT_MAX}")
    return name, int(port)


def _bad(text: str, hint: str) -> UsageError:
    return UsageError("bad_label", f"{text[:80]!r} is neither NAME nor NAME:PORT", field=f"labels.{LABEL}", hint=hint)
