"""mountinfo, /proc and cgroup files as the kernel writes them."""

from __future__ import annotations

import pytest

from nomad_dsec.linux.cgroup_files import parse_keyed
from nomad_dsec.linux.mountinfo import mount_of, parse_mountinfo
from nomad_dsec.linux.nft_table import parse_resolvers
from nomad_dsec.linux.procfs import parse_meminfo, parse_start_time, parse_status

MOUNTS = rb"""22 1 253:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
30 22 0:25 / /data rw - tmpfs none rw
31 30 0:26 /sub /data/a\040b rw,nosuid master:2 propagate_from:1 - tmpfs odd\134name rw,size=4k
32 22 0:27 / /data ro - erofs img ro
"""


def test_mountinfo_fields_and_escapes() -> None:
    mounts = parse_mountinfo(MOUNTS)
    odd = mounts[2]
    assert (odd.target, odd.source, odd.root) == ("/data/a b", "odd\\name", "/sub")
    assert odd.propagation == ("master:2", "propagate_from:1")
    assert odd.options == ("rw", "nosuid")
    assert odd.super_options == ("rw", "size=4k")
    assert (mounts[0].mount_id, mounts[0].parent_id, mounts[0].device) == (22, 1, "253:0")


def test_mountinfo_junk_is_an_error() -> None:
    with pytest.raises(ValueError, match="not a mountinfo line"):
        parse_mountinfo(b"1 2 3\n")


@pytest.mark.parametrize(
    ("path", "fstype"),
    [("/", "ext4"), ("/data", "erofs"), ("/data/x", "erofs"), ("/database", "ext4"), ("/data/a b/c", "tmpfs")],
)
def test_mount_of_takes_the_longest_then_the_latest(path: str, fstype: str) -> None:
    found = mount_of(path, parse_mountinfo(MOUNTS))
    assert found is not None
    assert found.fstype == fstype


def test_start_time_survives_a_hostile_command_name() -> None:
    assert parse_start_time("7 (a) R 1 (b) S " + " ".join(str(n) for n in range(1, 40))) == 19


def test_status_meminfo_and_keyed_files() -> None:
    assert parse_status("Name:\tsh\nSeccomp:\t2\njunk\n") == {"Name": "sh", "Seccomp": "2"}
    assert parse_meminfo("MemTotal:  10 kB\nHugePages_Total:  3\n") == {"MemTotal": 10240, "HugePages_Total": 3}
    assert parse_keyed("oom_kill_disable 0\nunder_oom 0\noom_kill 3\nmax max\n")["oom_kill"] == 3
    assert "max" not in parse_keyed("max max\n")


def test_resolvers_that_a_sandbox_can_reach() -> None:
    text = "# x\nnameserver 127.0.0.53\nnameserver 10.0.0.2 \nnameserver fe80::1%eth0\nsearch a b\nnameserver 8.8.8.8\n"
    assert parse_resolvers(text) == ["10.0.0.2", "8.8.8.8"]
