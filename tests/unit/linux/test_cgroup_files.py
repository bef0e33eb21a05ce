"""Which hierarchy is used for what, and the order of the limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nomad_dsec.linux.cgroup_files import Layout, Limits, layout_of, limit_writes_v1, limit_writes_v2, path_of
from nomad_dsec.linux.mountinfo import parse_mountinfo

V1 = b"".join(
    b"%d 1 0:%d / /cg/%s rw - cgroup cgroup rw,%s\n" % (n, n, name.replace(b",", b"-"), name)
    for n, name in enumerate((b"cpu,cpuacct", b"memory", b"pids", b"freezer", b"name=systemd"), 30)
)
UNIFIED = b"50 1 0:50 / /cg/unified rw - cgroup2 cgroup2 rw\n"


def test_pure_v1_uses_freezer_and_cpuacct() -> None:
    layout = layout_of(parse_mountinfo(V1), {})
    assert layout.mode == "v1"
    assert set(layout.hierarchies()) == {"cpu", "memory", "pids", "freezer", "cpuacct"}
    assert layout.hierarchies()["cpuacct"] == "/cg/cpu-cpuacct"


def test_hybrid_limits_on_v1_and_does_the_rest_on_v2() -> None:
    layout = layout_of(parse_mountinfo(V1 + UNIFIED), {"/cg/unified": "hugetlb\n"})
    assert layout.mode == "hybrid"
    assert set(layout.hierarchies()) == {"unified", "cpu", "memory", "pids"}
    paths = {"unified": "/u", "memory": "/m"}
    assert path_of(layout, paths, "memory") == "/m"


def test_v2_needs_one_directory() -> None:
    layout = layout_of(parse_mountinfo(UNIFIED), {"/cg/unified": "cpuset cpu io memory pids"})
    assert layout.mode == "v2"
    assert layout.hierarchies() == {"unified": "/cg/unified"}
    assert path_of(layout, {"unified": "/u"}, "pids") == "/u"
    assert not layout.missing()


def test_a_missing_controller_is_named() -> None:
    layout = layout_of(parse_mountinfo(UNIFIED), {"/cg/unified": "cpu memory"})
    assert layout.missing() == ["pids"]


class KernelV1:
    """The rules that v1 enforces between its memory files."""

    def __init__(self, limit: int) -> None:
        self.limit = self.memsw = limit

    def write(self, name: str, value: str) -> None:
        amount = 1 << 62 if value == "-1" else int(value)
        if name == "memory.limit_in_bytes":
            assert amount <= self.memsw, "EINVAL"
            self.limit = amount
        elif name == "memory.memsw.limit_in_bytes":
            assert amount >= self.limit, "EINVAL"
            self.memsw = amount


@given(old=st.integers(1 << 20, 1 << 40), new=st.integers(1 << 20, 1 << 40))
def test_memory_may_be_raised_and_lowered(old: int, new: int) -> None:
    kernel = KernelV1(old)
    for controller, name, value in limit_writes_v1(Limits(cpus=1, memory_bytes=new, pids=1), idle=True, memsw=True):
        if controller == "memory":
            kernel.write(name, value)
    assert (kernel.limit, kernel.memsw) == (new, new)


@pytest.mark.parametrize("idle", [True, False])
def test_best_effort_gives_way(idle: bool) -> None:
    v1 = list(limit_writes_v1(Limits(cpus=2, memory_bytes=1 << 20, pids=9, best_effort=True), idle=idle, memsw=False))
    v2 = list(limit_writes_v2(Limits(cpus=2, memory_bytes=1 << 20, pids=9, best_effort=True), idle=idle, swap=True))
    # a cpu.idle group refuses cpu.shares and cpu.weight
    assert (("cpu", "cpu.idle", "1") in v1) == idle
    assert (("cpu", "cpu.shares", "2") in v1) != idle
    assert (("cpu", "cpu.weight", "1") in v2) != idle


def test_quota_is_never_below_the_kernels_least() -> None:
    writes = list(limit_writes_v2(Limits(cpus=0.001, memory_bytes=1 << 20, pids=1), idle=False, swap=False))
    assert ("cpu", "cpu.max", "1000 100000") in writes


def test_v2_forbids_swap() -> None:
    writes = list(limit_writes_v2(Limits(cpus=1, memory_bytes=1 << 20, pids=1), idle=False, swap=True))
    assert ("memory", "memory.swap.max", "0") in writes


def test_layout_is_data() -> None:
    assert Layout(v1={}, unified="", v2=frozenset()).missing() == ["cpu", "memory", "pids"]
