"""Asking for sandboxes: again while there is no room, and giving up in a way that leaves none without a caller."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from libdsec.errors import CapacityError, DsecError, ErrorBody, error_from_body
from libdsec.wire import CreateReply, Ok

if TYPE_CHECKING:
    from libdsec._http import Transport
    from libdsec.wire import CreateRequest

_CREATE_SLACK_S = 60.0
_FIRST_PAUSE_S = 0.1
_ABANDON_S = 5.0
_LONGEST_PAUSE_S = 2.0
_log = logging.getLogger("libdsec")


async def abandon(transport: Transport, key: str) -> None:
    """Say that nobody waits for this create any more. Bounded, and best effort: TTL and lease are behind it."""
    with suppress(DsecError, TimeoutError, RuntimeError):  # RuntimeError: the client was closed meanwhile
        async with asyncio.timeout(_ABANDON_S):
            await transport.request("DELETE", f"/v1/creates/{quote(key, safe='')}", Ok, repeatable=False)


async def ask_until_room(transport: Transport, request: CreateRequest) -> CreateReply:
    """Ask again while the refusal is said to pass, for wait_s in all; the key makes the repeats one create.

    Each new reason for waiting is a warning of the logger `libdsec`. The error has the seconds waited in its details.
    """
    began = time.monotonic()
    give_up_at = began + request.wait_s
    pause_s = _FIRST_PAUSE_S
    told = ""
    while True:
        try:
            return await transport.request(
                "POST",
                "/v1/sandboxes",
                CreateReply,
                body=request,
                quick=False,
                timeout_s=request.wait_s + _CREATE_SLACK_S,
            )
        except CapacityError as full:
            left_s = give_up_at - time.monotonic()
            if full.retry_after_s is None:
                raise
            if left_s <= 0:
                full.details["waited_s"] = round(time.monotonic() - began, 1)
                raise
            if full.code != told:
                told = full.code
                _log.warning("create waits for room, at most %.3g s more (wait_s): %s", left_s, full)
            wanted_s = min(max(pause_s, full.retry_after_s), _LONGEST_PAUSE_S)
            await asyncio.sleep(min(left_s, wanted_s * random.uniform(0.5, 1.5)))  # noqa: S311 - jitter
            pause_s *= 2


def failures_of(reply: CreateReply) -> list[DsecError]:
    """The errors of members that could not be made."""
    return [error_from_body(_error_body(failure.error)) for failure in reply.failures]


def _error_body(raw: dict[str, Any]) -> ErrorBody:
    return msgspec.convert({"kind": "platform", "code": "unknown", "message": "no reason was given", **raw}, ErrorBody)
