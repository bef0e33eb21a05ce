"""Why a container ended, told apart without parsing anything that a program printed."""

from __future__ import annotations

import pytest
from libdsec.errors import StateError

from nomad_dsec.backends.container.live import Live
from nomad_dsec.backends.container.record import Record
from nomad_dsec.linux.syscalls import SyscallError

RECORD = Record(
    boot_id="b", launcher="native", digest="", uid_base=1 << 28, socket="/d/run/x.sock", cgroup={}, net={}, upper={}
)


class Counting:
    """A cgroup that says how many were killed for memory."""

    def __init__(self, kills: int | None) -> None:
        self.kills = kills

    def oom_kills(self) -> int:
        if self.kills is None:
            raise SyscallError(2, "open", "memory.events")
        return self.kills


@pytest.mark.parametrize(("kills", "reason"), [(0, "init_exited"), (2, "oom"), (None, "init_exited")])
def test_cause(kills, reason):
    assert Live(sandbox="sb", owner="sb#1", record=RECORD, cgroup=Counting(kills)).cause().reason == reason


@pytest.mark.parametrize(("seen", "reason"), [(1, "oom"), (2, "init_exited")])
def test_kills_that_init_outlived_are_not_its_cause(seen, reason):
    assert Live(sandbox="sb", owner="sb#1", record=RECORD, cgroup=Counting(2), oom_seen=seen).cause().reason == reason


def test_cause_without_a_cgroup():
    assert Live(sandbox="sb", owner="sb#1", record=RECORD).cause().reason == "init_exited"


async def test_nothing_to_wait_for():
    with pytest.raises(StateError):
        await Live(sandbox="sb", owner="sb#1", record=RECORD).wait_ended()
