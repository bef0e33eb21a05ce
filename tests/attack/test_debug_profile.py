"""The `debug` profile does what it is for, with the debuggers that people use; the default profile does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.attack.marks import IN_SANDBOX
from tests.kit.abilities import needs
from tests.kit.small_image import add_debuggers, make_tree

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.kit.sandbox import Box, Machine

pytestmark = IN_SANDBOX
GDB = ("/usr/bin/gdb", "-nx", "-batch", "-ex", "break write", "-ex", "run", "-ex", "backtrace", "-ex", "kill", "--args")


@pytest.fixture(scope="module")
def tools(machine: Machine, attacker: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image with the host's debuggers."""
    tree = tmp_path_factory.mktemp("tools")
    tree.chmod(0o755)
    return machine.add_image(add_debuggers(make_tree(tree, attacker)), "tools")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def debug(machine: Machine, tools: str) -> AsyncIterator[Box]:
    """A sandbox in which ptrace works."""
    async with machine.sandbox(tools, {"profile": "debug"}, memory_mib=256) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def plain(machine: Machine, tools: str) -> AsyncIterator[Box]:
    """The same image under the default policy."""
    async with machine.sandbox(tools, memory_mib=256) as running:
        yield running


@needs("strace")
async def test_strace_follows_a_program(debug: Box) -> None:
    outcome = await debug.run("/usr/bin/strace", "-f", "-e", "trace=openat", "/usr/bin/cat", "/etc/passwd", user="1000")
    assert outcome.exit_code == 0, outcome
    assert b'"/etc/passwd"' in outcome.stderr


@needs("strace")
async def test_twin_strace_is_denied_by_the_default_profile(plain: Box) -> None:
    """Layer: seccomp."""
    outcome = await plain.run("/usr/bin/strace", "/usr/bin/cat", "/etc/passwd")
    assert outcome.exit_code != 0
    assert b"Operation not permitted" in outcome.stderr


@needs("gdb")
async def test_gdb_stops_at_a_breakpoint_with_fixed_addresses(debug: Box) -> None:
    """It switches address randomization off by personality(2), which the default profile refuses."""
    outcome = await debug.run(*GDB, "/usr/bin/cat", "/etc/passwd")
    text = outcome.stdout + outcome.stderr
    assert b"Breakpoint 1" in text, outcome
    assert b"#0" in text
    assert b"Error disabling address space randomization" not in text


@needs("gdb")
async def test_twin_gdb_can_not_start_a_program_under_the_default_profile(plain: Box) -> None:
    outcome = await plain.run(*GDB, "/usr/bin/cat", "/etc/passwd")
    assert b"Operation not permitted" in outcome.stderr
    assert b"#0" not in outcome.stdout


async def test_root_inside_debugs_its_users(debug: Box) -> None:
    """CAP_SYS_PTRACE in the sandbox's own user namespace."""
    script = "setsid true 2>/dev/null; attack sleep 20 & target=$!; sleep 0.2; attack tamper $target; kill -9 $target"
    lines = dict(line.rsplit(" ", 1) for line in (await debug.shell(script)).splitlines() if " " in line)
    assert lines["attach"] == lines["open_mem"] == "0"
