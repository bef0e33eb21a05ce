"""A backend with the native launcher for the module, and an image that can be bent into hostile shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.kit.attacker import build_attacker
from tests.kit.sandbox import Machine
from tests.kit.small_image import make_tree

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture(scope="module")
def attacker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_attacker(tmp_path_factory.mktemp("attacker"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def machine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Machine]:
    directory = tmp_path_factory.mktemp("machine")
    opened = await Machine.open(directory, pool_slots=4, network_pool=0)
    try:
        yield opened
    finally:
        await opened.close()


@pytest.fixture(scope="module")
def tree(attacker: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain root file system, to be copied and changed."""
    root = tmp_path_factory.mktemp("tree")
    root.chmod(0o755)
    return make_tree(root, attacker)


@pytest.fixture(scope="module")
def image(machine: Machine, tree: Path) -> str:
    return machine.add_image(tree, "plain")
