"""One machine for the session: the attacker's binary, its image, the backend, and sandboxes of it.

The pools of the backend come and go behind the tests, so these are marked `leaks_ok` and the census of everything that
the backend could leave is taken here, around all of them.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from dsec_policies.abilities import HostAbilities
from dsec_policies.compile import compile_policy
from dsec_policies.model import Policy

from nomad_dsec.linux.nft_table import link_prefix
from tests.kit.attacker import build_attacker
from tests.kit.leaks import Census
from tests.kit.sandbox import Machine
from tests.kit.small_image import make_tree

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.kit.sandbox import Box


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The session's backend lives on the session's loop, so the tests that use it run there too."""
    for item in items:
        if item.nodeid.startswith("tests/attack/") and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest.fixture(scope="session")
def attacker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The payload, statically linked, so that it runs in any image."""
    return build_attacker(tmp_path_factory.mktemp("attacker"))


@pytest.fixture(scope="session")
def default_program() -> bytes:
    """The filter of the default profile."""
    return compile_policy(Policy(), HostAbilities.assumed()).seccomp


@asynccontextmanager
async def _open_machine(directory: Path, **config: Any) -> AsyncIterator[Machine]:
    """A backend on a directory of its own; nothing is left of it at the end."""
    before = Census.take()
    opened = await Machine.open(directory, **config)
    try:
        yield opened
    finally:
        await opened.close()
    # Another test run on this machine may come and go meanwhile: only what carries this node's name counts.
    mine = (opened.node, link_prefix(opened.node), str(directory))
    left = [thing for thing in before.wait_same(timeout_s=5.0) if any(mark in thing for mark in mine)]
    assert not left, "left behind by the backend: " + "; ".join(left)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def machine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Machine]:
    """The native launcher's."""
    async with _open_machine(tmp_path_factory.mktemp("machine")) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def crun_box(attacker: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Box]:
    """A sandbox with the default policy that crun has launched, on a machine of its own."""
    tree = tmp_path_factory.mktemp("crun-tree")
    tree.chmod(0o755)
    directory = tmp_path_factory.mktemp("crun")
    async with _open_machine(directory, launcher="oci:crun", pool_slots=2, network_pool=0) as opened:
        digest = opened.add_image(make_tree(tree, attacker), "attack")
        async with opened.sandbox(digest) as running:
            yield running


@pytest.fixture(scope="session")
def image(machine: Machine, attacker: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of an image with bash, a few tools and the attacker's program."""
    tree = tmp_path_factory.mktemp("tree")
    tree.chmod(0o755)
    return machine.add_image(make_tree(tree, attacker), "attack")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def box(machine: Machine, image: str) -> AsyncIterator[Box]:
    """A sandbox with the default policy, for attacks that change nothing."""
    async with machine.sandbox(image) as running:
        yield running
