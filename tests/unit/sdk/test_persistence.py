"""How long a call that may be repeated goes on, and what it says meanwhile."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest
from libdsec import _http
from libdsec._http import Cut, Persistence


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Sleeps pass at once, on a clock of their own."""
    now, pauses = [100.0], []

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        now[0] += pause_s

    monkeypatch.setattr(_http, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(_http, "asyncio", SimpleNamespace(sleep=sleep))
    return pauses


def try_for(window_s: float) -> None:
    """As a call does whose every attempt is cut."""

    async def attempts() -> None:
        persistence = Persistence(window_s)
        while True:
            await persistence.pause_or_raise(Cut("GET /v1/x: refused", sent=False), repeatable=True)

    with pytest.raises(Cut, match="refused"):
        asyncio.run(attempts())


def test_a_long_wait_is_told_once_with_its_reason(slept: list[float], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "libdsec"):
        try_for(20.0)
    (record,) = caplog.records
    assert "refused" in record.getMessage()
    assert "trying again for up to 1" in record.getMessage()
    assert 18 < sum(slept) < 24


def test_a_short_one_is_not(slept: list[float], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "libdsec"):
        try_for(1.0)
    assert caplog.records == []
    assert slept
