"""The yardstick: what our own launcher makes, fact by fact, against what crun and runc make of the same spec.

Where they differ by design it is written here: device nodes are made (native) or bound from the host (OCI), and masks
are covered by sources of different kinds; both are compared by what a reader meets.
"""

from __future__ import annotations

import os
import shutil
import socket
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from dsec_policies.compile import compile_policy
from dsec_policies.model import parse_policy
from dsec_policies.probe import probe
from libdsec.errors import PlatformError, UsageError

from nomad_dsec.backends.container.launcher import Launcher, Slot
from nomad_dsec.backends.container.native import NativeLauncher
from nomad_dsec.backends.container.oci import OciLauncher
from nomad_dsec.backends.container.spec import ContainerSpec, HostMount, Limits, TmpfsUpper
from nomad_dsec.guest.build import build
from nomad_dsec.guest.channel import GuestChannel
from nomad_dsec.linux import cgroup_files
from nomad_dsec.linux.cgroup import Cgroup, CgroupRoot
from nomad_dsec.linux.netns_pool import NetnsPool
from nomad_dsec.linux.pidfd import is_ended
from tests.kit.abilities import needs
from tests.kit.launcher_facts import differences, facts
from tests.kit.small_image import make_tree

pytestmark = needs("root", "cgroup", "userns", "netns", "overlay", "filters", "cc")
MIB = 1 << 20
BASE = 0x3000_0000
POLICY = {"protected_paths": ["/bin/bash", "/etc/passwd"]}


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("init"))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tree(tmp_path_factory.mktemp("image"), Path("/bin/true"))


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What launchers are tried on."""

    root: CgroupRoot
    cgroup: Cgroup
    slot: Slot
    listener: socket.socket
    spec: ContainerSpec
    binary: Path

    def launcher(self, name: str) -> Launcher:
        if name == "native":
            return NativeLauncher(self.binary, self.root.layout)
        return OciLauncher(name, self.binary, self.root.layout)


@pytest_asyncio.fixture
async def bench(binary: Path, image: Path, tmp_path: Path):
    async with AsyncExitStack() as stack:
        node = f"a{os.getpid()}"
        root = CgroupRoot.detect(node)
        stack.push_async_callback(root.remove)
        cgroup = root.create("c1", cgroup_files.Limits(cpus=1, memory_bytes=128 * MIB, pids=64))
        stack.push_async_callback(cgroup.kill, timeout_s=10)
        nets = NetnsPool(node, closed_size=0)
        stack.push_async_callback(nets.close)
        net = await nets.take("none")
        stack.push_async_callback(nets.give_back, net)
        fd = cgroup.open_delegated(BASE, BASE)
        if fd >= 0:
            stack.callback(os.close, fd)
        shown = tmp_path / "shown"
        shown.mkdir()
        (shown / "file").write_text("of the host")
        spec = ContainerSpec(
            id="sb-a-aaaaaaaaaaaaaaaa",
            incarnation=1,
            rootfs=image,
            upper=TmpfsUpper(size_bytes=32 * MIB, inodes=4096),
            limits=Limits(cpus=1, memory_bytes=128 * MIB, pids=64),
            policy=compile_policy(parse_policy(POLICY), probe()),
            uid_base=BASE,
            runtime_dir=tmp_path,
            hostname="yardstick",
            nameservers=("192.0.2.53",),
            secrets={"token": "s3cret"},
            mounts=(HostMount(source=shown, target="/mnt/shown"),),
        )
        listener = socket.socket(socket.AF_UNIX)
        stack.callback(listener.close)
        listener.bind(str(spec.socket_path))
        listener.listen()
        yield Bench(
            root=root,
            cgroup=cgroup,
            slot=Slot(cgroup=cgroup, cgroup_fd=fd, net=net),
            listener=listener,
            spec=spec,
            binary=binary,
        )


async def seen(bench: Bench, name: str) -> dict[str, Any]:
    """All facts of one container made by this launcher, which is then killed."""
    launcher = bench.launcher(name)
    try:
        launched = await launcher.launch(bench.spec, bench.slot, bench.listener.fileno())
        try:
            # An answer shows that init_serve has begun, and with it that it has closed what it was not told to keep.
            channel = await GuestChannel.connect(str(bench.spec.socket_path), timeout_s=10)
            await channel.close()
            policy = bench.spec.policy
            found = facts(launched.pid, masks=policy.masked_paths, read_only=policy.read_only_paths)
            found["net is the slot's"] = (
                os.stat(f"/proc/{launched.pid}/ns/net").st_ino == os.fstat(bench.slot.net.fd).st_ino
            )
            found["descriptors"] = sorted(
                os.readlink(path).split(":")[0] for path in Path(f"/proc/{launched.pid}/fd").iterdir()
            )
            found["program"] = os.readlink(f"/proc/{launched.pid}/exe")
            found["shown"] = Path(f"/proc/{launched.pid}/root/mnt/shown/file").read_text()
            await bench.cgroup.kill(timeout_s=10)
            assert is_ended(launched.pidfd)
            assert bench.cgroup.remove_exec_cgroups()
        finally:
            os.close(launched.pidfd)
        await launcher.forget(bench.spec.id, bench.spec.runtime_dir)
    finally:
        await launcher.close()
    return found


@pytest.mark.parametrize(
    "runtime", [pytest.param("crun", marks=needs("crun")), pytest.param("runc", marks=needs("runc"))]
)
async def test_all_facts_agree(bench: Bench, runtime: str) -> None:
    mine, theirs = await seen(bench, "native"), await seen(bench, runtime)
    differing = differences(mine, theirs)
    assert not differing, "\n".join(["native != " + runtime, *differing])
    assert set(mine["masks"].values()) <= {"empty", "absent"}
    assert mine["net is the slot's"]
    assert mine["status"]["Seccomp"] == ["2"]
    assert mine["program"].startswith("/memfd:dsec-init")


@pytest.mark.parametrize("runtime", ["native", pytest.param("crun", marks=needs("crun"))])
async def test_a_protected_path_that_is_not_there_is_refused_and_nothing_stays(bench: Bench, runtime: str) -> None:
    policy = compile_policy(parse_policy({"protected_paths": ["/bin/absent"]}), probe())
    launcher = bench.launcher(runtime)
    values = {name: getattr(bench.spec, name) for name in bench.spec.__dataclass_fields__} | {"policy": policy}
    try:
        with pytest.raises(UsageError) as refused:
            await launcher.launch(ContainerSpec(**values), bench.slot, bench.listener.fileno())
    finally:
        await launcher.close()
    assert refused.value.code == "protected_path_missing"
    assert refused.value.field == "policy.protected_paths"
    await bench.cgroup.kill(timeout_s=10)
    assert bench.cgroup.is_empty()


@pytest.mark.parametrize(
    "runtime", [pytest.param("crun", marks=needs("crun")), pytest.param("runc", marks=needs("runc"))]
)
async def test_a_runtime_that_fails_is_quoted_and_leaves_nothing(bench: Bench, runtime: str) -> None:
    launcher = OciLauncher(runtime, bench.binary, bench.root.layout)
    values = {name: getattr(bench.spec, name) for name in bench.spec.__dataclass_fields__}
    broken = ContainerSpec(**(values | {"hostname": "x" * 80}))
    with pytest.raises(PlatformError) as failed:
        await launcher.launch(broken, bench.slot, bench.listener.fileno())
    assert failed.value.code == "launch_failed"
    assert failed.value.details["step"] in ("create", "start")
    assert "sethostname" in str(failed.value)
    assert bench.cgroup.is_empty()


@needs("crun")
async def test_the_hosts_devices_keep_their_owner(bench: Bench) -> None:
    """crun hands its standard descriptors to the container's root: /dev/null must not be among them."""
    before = {path: (os.stat(path).st_uid, os.stat(path).st_mode) for path in ("/dev/null", "/dev/zero", "/dev/tty")}
    await seen(bench, "crun")
    assert {path: (os.stat(path).st_uid, os.stat(path).st_mode) for path in before} == before


@needs("crun")
async def test_what_launch_would_do_can_be_printed(bench: Bench) -> None:
    plan = OciLauncher("crun", bench.binary, bench.root.layout).plan(bench.spec)
    assert [entry["op"] for entry in plan][:2] == ["stage", "config.json"]
    assert plan[-1]["op"] == "serve"
    assert "s3cret" not in repr(plan)


async def test_a_runtime_that_is_not_there_is_told(binary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = CgroupRoot.detect("absent").layout
    await CgroupRoot.detect("absent").remove()
    assert shutil.which("crun") or "not on PATH" in await OciLauncher("crun", binary, layout).probe()
    monkeypatch.setenv("PATH", "/nowhere")
    assert "not on PATH" in await OciLauncher("crun", binary, layout).probe()
    assert "openat2" in await OciLauncher("runsc", binary, layout).probe()
    with pytest.raises(UsageError) as unknown:
        OciLauncher("rkt", binary, layout)
    assert unknown.value.field == "node.launcher"
