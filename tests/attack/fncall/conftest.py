"""One host of calls for all tests here; its lanes come and go behind them, so leaks are counted around the whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.kit.calls import CallHost, open_call_host
from tests.kit.leaks import Census

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HERE = "tests/attack/fncall/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The host lives on the session's loop, so the tests that use it run there too."""
    for item in items:
        mine = item.nodeid.startswith(HERE) and "calls" in getattr(item, "fixturenames", ())
        if mine and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def calls(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[CallHost]:
    """Lanes over the development image."""
    before = Census.take()
    async with open_call_host(tmp_path_factory.mktemp("calls")) as host:
        yield host
    left = [thing for thing in before.wait_same(timeout_s=5.0) if host.node in thing]
    assert not left, f"left behind: {left}"
