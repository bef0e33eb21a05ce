"""What a native container is made of, seen from inside and from the host."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import pytest_asyncio
from dsec_policies.capabilities import mask_of
from dsec_policies.profiles import DEFAULT
from libdsec.errors import PlatformError

from nomad_dsec.linux.procfs import status
from tests.kit.abilities import needs

pytestmark = [
    needs("root", "erofs", "overlay", "userns", "netns", "cgroup", "filters", "cc"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.leaks_ok,  # the module's backend keeps its pools; the contract suite takes the census
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(machine, image):
    async with machine.sandbox(image) as running:
        yield running


async def test_every_namespace_is_its_own(box):
    for name in ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts"):
        assert os.readlink(f"/proc/{box.pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}"), name


async def test_rights_of_programs_are_the_profiles(box):
    text = await box.shell("cat /proc/self/status")
    fields = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    execs = f"{mask_of(DEFAULT.capabilities):016x}"
    assert (fields["CapBnd"], fields["CapEff"], fields["CapPrm"]) == (execs, execs, execs)
    assert int(fields["CapInh"], 16) == int(fields["CapAmb"], 16) == 0
    assert (fields["NoNewPrivs"], fields["Seccomp"], fields["Seccomp_filters"].strip()) == ("1", "2", "1")
    init = status(box.pid) or {}
    assert int(init["CapEff"], 16) == mask_of(DEFAULT.init_capabilities)
    assert init["Uid"].split()[0] == str(box.started.handle.data["uid_base"])


async def test_init_keeps_only_its_own_descriptors(box):
    """CVE-2024-21626: one descriptor of the host is a way out."""
    targets = {int(fd): os.readlink(f"/proc/{box.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{box.pid}/fd")}
    assert [targets[fd] for fd in (0, 1, 2)] == ["/dev/null"] * 3
    cgroup = box.backend._live[f"{box.spec.id}#1"].cgroup
    # its exec groups, and the counter by which it tells kills for memory, to read
    counters = {f"{path}/{name}" for path in cgroup.paths.values() for name in ("memory.oom_control", "memory.events")}
    for fd, target in targets.items():
        known = re.match(r"socket:|anon_inode:|pipe:", target) or target in ("/dev/null", "/")
        assert known or target in counters or target.startswith(cgroup.unified), (fd, target)
        if target in counters:
            flags = int(re.search(r"flags:\s*(\d+)", Path(f"/proc/{box.pid}/fdinfo/{fd}").read_text())[1], 8)
            assert flags & os.O_ACCMODE == os.O_RDONLY


async def test_programs_start_with_three_descriptors(box):
    script = "for fd in {0..255}; do [ -e /proc/$$/fd/$fd ] && echo $fd; done"
    # 255 is bash's own
    assert (await box.shell(script)).split() in (["0", "1", "2"], ["0", "1", "2", "255"])


async def test_init_runs_from_a_sealed_copy(box):
    """CVE-2019-5736: nothing inside can be the file that the host executes, nor write to it."""
    assert "memfd:dsec-init" in os.readlink(f"/proc/{box.pid}/exe")
    with pytest.raises(OSError):
        os.open(f"/proc/{box.pid}/exe", os.O_WRONLY)
    assert await box.shell("(: > /proc/1/exe) 2>/dev/null && echo opened || echo refused") == "refused"
    assert "memfd" not in await box.shell("ls -l /proc/1/exe 2>&1")


async def test_nothing_of_the_host_is_named_inside(box, machine):
    seen = await box.shell(
        "cat /proc/self/mountinfo /proc/self/cgroup /proc/1/cgroup /proc/mounts /etc/hosts /proc/1/cmdline"
    )
    for word in (machine.node, str(machine.backend._host.config.data), "/tmp", "/var/lib", "sys/fs/cgroup/unified"):
        assert word not in seen, word


async def test_kernel_files_are_masked_and_sealed(box):
    mounts = await box.shell("cat /proc/self/mountinfo")
    points = {line.split()[4]: line.split()[5] for line in mounts.splitlines()}
    for path in DEFAULT.masked_paths:
        if Path(path).exists():
            assert "ro" in points[path].split(","), path
            assert await box.shell(f"[ -d {path} ] && ls -A {path} || head -c 1 {path}") == ""
    for path in ("/proc/sys", "/proc/irq", "/proc/bus", "/proc/fs", "/sys"):
        assert "ro" in points[path].split(","), path
    assert await box.shell("cat /proc/sys/user/max_user_namespaces /proc/sys/user/max_mnt_namespaces") == "0\n0"


async def test_root_inside_owns_its_files_and_dev_works(box):
    owners = await box.shell("stat -c %u:%g:%a / /etc/passwd /dev/shm /dev/null")
    assert owners.split() == ["0:0:755", "0:0:644", "0:0:1777", "0:0:666"]
    assert await box.shell("echo x > /dev/null && dd if=/dev/zero bs=4 count=1 status=none | cat -A") == "^@^@^@^@"
    assert await box.shell("dd if=/dev/urandom bs=4 count=1 of=/dev/full 2>&1 | cat") != ""
    assert await box.shell("echo data > /root/f && cat /root/f") == "data"
    assert await box.shell("cat /etc/hostname") == "box"
    assert "localhost" in await box.shell("cat /etc/hosts")


async def test_limits_of_the_spec_are_in_force(box):
    assert await box.shell("ulimit -n; ulimit -c") == "4096\n0"
    paths = box.backend._live[f"{box.spec.id}#1"].cgroup.paths
    if "memory" in paths:
        assert Path(paths["memory"], "memory.limit_in_bytes").read_text().strip() == str(128 << 20)
        assert Path(paths["pids"], "pids.max").read_text().strip() == "64"


async def test_dead_launcher_is_replaced_and_sandboxes_stay(machine, image):
    async with machine.sandbox(image) as one:
        os.kill(machine.backend._launcher._spawner._pid, signal.SIGKILL)
        with_retry = None
        for _ in range(2):  # the first start may find out the hard way
            try:
                async with machine.sandbox(image) as other:
                    assert await other.shell("echo other") == "other"
                break
            except PlatformError as error:
                with_retry = error
        assert with_retry is None or with_retry.code == "launcher_died"
        assert await one.shell("echo one") == "one"


TYPES = {"proc": "proc", "sys": "sysfs", "dev": "tmpfs"}


def bent(tree: Path, to: Path, *changes) -> Path:
    """A copy of the image's tree with names replaced: (path, link target | None for a FIFO | "dir")."""
    shutil.copytree(tree, to, symlinks=True)
    for path, target in changes:
        at = to / path
        if at.is_dir() and not at.is_symlink():
            shutil.rmtree(at)
        elif at.exists() or at.is_symlink():
            at.unlink()
        if target is None:
            os.mkfifo(at)
        elif target == "dir":
            at.mkdir()
        else:
            at.symlink_to(target)
    return to


async def test_links_for_etc_files_are_replaced_not_followed(machine, tree, tmp_path):
    hostile = bent(
        tree, tmp_path / "t", ("etc/hosts", "/proc/1/environ"), ("etc/hostname", None),
        ("etc/resolv.conf", "../run/systemd/resolve/stub-resolv.conf"),
    )  # fmt: skip
    async with machine.sandbox(machine.add_image(hostile, "etc")) as box:
        kinds = await box.shell("stat -c %F /etc/hosts /etc/hostname /etc/resolv.conf 2>&1")
        assert "link" not in kinds
        assert "fifo" not in kinds
        assert "localhost" in await box.shell("cat /etc/hosts")


async def test_a_link_for_etc_stays_inside(machine, tree, tmp_path):
    hostile = bent(tree, tmp_path / "t", ("etc", "/../../../work"))
    async with machine.sandbox(machine.add_image(hostile, "etclink")) as box:
        assert "localhost" in await box.shell("cat /work/hosts")


@pytest.mark.parametrize("name", ["proc", "sys", "dev"])
async def test_links_for_kernel_directories_are_refused(machine, tree, tmp_path, name):
    """CVE-2025-52881 and its kin: a crafted root must not steer the kernel's file systems elsewhere."""
    hostile = bent(tree, tmp_path / "t", (name, "work"))
    with pytest.raises(PlatformError) as caught:
        async with machine.sandbox(machine.add_image(hostile, f"link{name}")):
            pass
    assert caught.value.code == "launch_failed"
    assert caught.value.details["step"] == f"mount {TYPES[name]}"


async def test_a_crafted_dev_null_is_not_what_masks_are_made_of(machine, tree, tmp_path):
    """CVE-2025-31133, CVE-2025-52565."""
    hostile = bent(
        tree,
        tmp_path / "t",
        ("dev/null", "/proc/sys/kernel/core_pattern"),
        ("dev/console", "/proc/sys/kernel/core_pattern"),
    )
    async with machine.sandbox(machine.add_image(hostile, "null")) as box:
        assert await box.shell("stat -c %t:%T /dev/null") == "1:3"
        assert await box.shell("head -c 1 /proc/kcore; head -c 1 /proc/kpageflags") == ""
        said = await box.shell("(echo x > /proc/sys/kernel/core_pattern) 2>&1")
        assert "denied" in said or "Read-only" in said


async def test_an_empty_image_starts(machine, tmp_path):
    """Directories that an image lacks are made."""
    root = tmp_path / "empty"
    root.mkdir(mode=0o755)
    (root / "bin").mkdir()
    async with machine.sandbox(machine.add_image(root, "empty")) as box:
        outcome = await box.run("/bin/true")
        assert outcome.start_error is not None
        assert outcome.start_error.code == "command_not_found"
