"""Kernel files that show or change the host: /proc/kpage* and the rest of the masks, settings, devices, hostile images.

Layers: masks and read-only binds in the sandbox's mount namespace, made from verified descriptors; the user namespace.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from dsec_policies.profiles import DEFAULT
from libdsec.errors import DsecError

from tests.attack.marks import IN_SANDBOX
from tests.kit.attacker import run_naive
from tests.kit.small_image import make_tree

if TYPE_CHECKING:
    from tests.kit.sandbox import Box, Machine

pytestmark = IN_SANDBOX
SETTINGS = (
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/modprobe",
    "/proc/sys/vm/overcommit_memory",
    "/proc/sys/net/ipv4/ip_forward",
    "/proc/sys/user/max_user_namespaces",
    "/proc/irq/default_smp_affinity",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/power/state",
)
DEVICES = tuple(f"/dev/{name}" for name in "kmsg mem kvm fuse net/tun loop-control loop0 vda sda".split())
REFUSED = {errno.EPERM, errno.EACCES, errno.EROFS, errno.ENOENT}


async def test_masked_files_are_empty(box: Box) -> None:
    """Among them kpagecgroup, kpagecount, kpageflags: the page tables of the whole machine."""
    got = await box.attack("peek", *DEFAULT.masked_paths)
    shown = {path: size for path, size in got.items() if size > 0}
    assert not shown
    for name in ("kpagecgroup", "kpagecount", "kpageflags"):
        assert got[f"/proc/{name}"] == 0, "covered by /dev/null, not merely denied"


def test_twin_without_masks_they_tell(attacker: Path) -> None:
    got = run_naive(attacker, "peek", *DEFAULT.masked_paths)
    shown = {path for path, size in got.items() if size > 0}
    assert {"/proc/kpagecgroup", "/proc/kpagecount", "/proc/kpageflags", "/proc/kallsyms", "/proc/interrupts"} <= shown


@pytest.mark.parametrize("user", ["", "1000"])
async def test_settings_can_not_be_written(box: Box, user: str) -> None:
    got = await box.attack("open", "w", *SETTINGS, user=user)
    assert {path: code for path, code in got.items() if code not in REFUSED} == {}


def test_twin_without_a_policy_settings_open_for_writing(attacker: Path) -> None:
    got = run_naive(attacker, "open", "w", *SETTINGS)
    assert {path for path, code in got.items() if code == 0} >= {SETTINGS[0], SETTINGS[2]}


async def test_no_device_of_the_host_is_there(box: Box) -> None:
    got = await box.attack("open", "r", *DEVICES)
    assert set(got.values()) == {errno.ENOENT}
    listed = (await box.shell("cd /dev; echo *")).split()
    allowed = {device.name for device in DEFAULT.devices} | {"fd", "stdin", "stdout", "stderr", "ptmx", "pts", "shm"}
    assert set(listed) <= allowed | {"mqueue", "console", "core"}


def test_twin_the_host_has_such_devices(attacker: Path) -> None:
    assert 0 in run_naive(attacker, "open", "r", *DEVICES).values()


async def test_no_cgroup_tree_and_no_release_agent(box: Box) -> None:
    """CVE-2022-0492: nothing to write a release_agent into, and (see the battery) no mount that would show one."""
    kinds = {line.split()[2] for line in (await box.shell("cat /proc/mounts")).splitlines()}
    assert not kinds & {"cgroup", "cgroup2"}
    assert (await box.attack("peek", "/sys/fs/cgroup"))["/sys/fs/cgroup"] == 0


async def test_nothing_of_the_host_s_mounts_shows(box: Box) -> None:
    """Layer: pivot_root and the old root detached."""
    mounts = await box.shell("cat /proc/self/mountinfo")
    assert "/work/" not in mounts
    assert str(Path.home()) + " " not in mounts
    host = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    inside = {line.split()[4] for line in mounts.splitlines()}
    assert not {path for path in inside & host if not path.startswith(("/proc", "/sys", "/dev")) and path != "/"}


HOSTILE = {
    "CVE-2025-31133: /dev/null leads to a setting": ("dev/null", "/proc/sys/kernel/core_pattern"),
    "CVE-2025-52565: /dev/console leads to a setting": ("dev/console", "/proc/sysrq-trigger"),
    "CVE-2025-52565: /dev/pts leads to proc": ("dev/pts", "/proc"),
    "/dev/shm leads out": ("dev/shm", "/../../../../../tmp"),
    "/etc/hosts leads to a setting": ("etc/hosts", "/proc/sys/kernel/core_pattern"),
    "/etc/resolv.conf leads out": ("etc/resolv.conf", "../../../../../../etc/shadow"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_an_image_s_links_steer_no_mount(machine: Machine, attacker: Path, tmp_path: Path, name: str) -> None:
    """The sandbox starts, masks stand, and the host's settings are as before."""
    tmp_path.chmod(0o755)
    tree = make_tree(tmp_path, attacker)
    link, target = HOSTILE[name]
    (tree / link).symlink_to(target)
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    digest = machine.add_image(tree, "hostile")
    async with machine.sandbox(digest) as box:
        got = await box.attack("peek", "/proc/kpagecount", "/proc/kallsyms")
        assert got == {"/proc/kpagecount": 0, "/proc/kallsyms": 0}
        got = await box.attack("open", "w", "/proc/sys/kernel/core_pattern")
        assert set(got.values()) <= REFUSED
        assert await box.shell("stat -c %t:%T /dev/null") == "1:3"
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before


@pytest.mark.parametrize("name", ["proc", "sys", "dev"])
async def test_an_image_whose_proc_is_a_link_is_refused(
    machine: Machine, attacker: Path, tmp_path: Path, name: str
) -> None:
    """CVE-2025-52881 and its like: proc mounted elsewhere would leave masks on nothing. Layer: RESOLVE_NO_SYMLINKS."""
    tmp_path.chmod(0o755)
    tree = make_tree(tmp_path, attacker)
    (tree / name).rmdir()
    (tree / name).symlink_to("/work")
    digest = machine.add_image(tree, f"link-{name}")
    with pytest.raises(DsecError):
        async with machine.sandbox(digest):
            pass
