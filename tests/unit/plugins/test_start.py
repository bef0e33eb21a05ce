"""A start while the node daemon answers nothing: told in words, and worth another try."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from dsec_plugins.drivers import driver as drivers
from dsec_plugins.drivers.kinds import KINDS
from dsec_plugins.drivers.statuses import is_retryable
from libdsec.errors import DeadlineExceeded, PlatformError


class _Hung:
    """A node daemon whose starts never end; `/v1/node` is answered so many times."""

    def __init__(self, answers: int) -> None:
        self.answers = answers
        self.asked = 0
        self.left = False

    async def call(self, method, path, kind, body=None, *, timeout_s):
        if method == "PUT":
            try:
                await asyncio.Event().wait()
            finally:
                self.left = True
        self.asked += 1
        if self.asked > self.answers:
            raise DeadlineExceeded("node_timeout", "nothing")


@pytest.mark.parametrize("answers", [0, 3])
async def test_a_hung_node_daemon_ends_a_start_with_the_reason(monkeypatch, answers):
    monkeypatch.setattr(drivers, "_LOOK_S", 0.0)
    node = _Hung(answers)
    driver = drivers.Driver(KINDS["dsec-container"], SimpleNamespace(node=node), asyncio.Event())
    async with asyncio.timeout(10):
        with pytest.raises(PlatformError, match="answered nothing") as caught:
            await driver._started("/v1/tasks/k", None)
    assert caught.value.code == "node_hangs"
    assert is_retryable(caught.value)
    assert (node.asked, node.left) == (answers + 1, True)
