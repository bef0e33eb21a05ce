"""The native launcher: one small C process (`dsec-init launch`) per daemon starts sandboxes from lists of operations.

Here a plan and its descriptors become a request, and the process's report a result; the process is in spawner.py.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from libdsec.errors import DeadlineExceeded, PlatformError, UsageError

from nomad_dsec.backends.container.launcher import Launched, Slot
from nomad_dsec.backends.container.mount_owners import open_sources
from nomad_dsec.backends.container.plan import (
    LAYER,
    LISTEN,
    NETNS,
    OOM,
    ROOTFS,
    UNIFIED,
    Plan,
    mount_fd,
    plan_container,
    procs_fd,
)
from nomad_dsec.backends.container.plan_ops import REPORT_BYTES, Report, unpack_report
from nomad_dsec.backends.container.spawner import Spawner
from nomad_dsec.backends.container.spec import DirUpper
from nomad_dsec.linux.memfd import make_memfd
from nomad_dsec.linux.pidfd import send_signal
from nomad_dsec.linux.syscalls import OPEN_TREE_CLONE, open_tree

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from nomad_dsec.backends.container.spec import ContainerSpec
    from nomad_dsec.linux.cgroup_files import Layout

LAUNCH_TIMEOUT_S: Final = 20.0
_NO_OP: Final = 0xFFFF_FFFF


class NativeLauncher:
    """Starts containers by our own C list-runner. One per daemon; the process is started when first needed."""

    name = "native"

    def __init__(self, binary: Path, layout: Layout) -> None:
        self._binary = binary
        self._controllers = tuple(name for name in layout.hierarchies() if name != UNIFIED)
        self._unified = bool(layout.unified)
        self._spawner: Spawner | None = None

    async def probe(self) -> str:
        """Empty when the C process starts and takes a request; what a sandbox needs beyond is seen at its start."""
        try:
            await self._running()
        except (PlatformError, OSError) as error:
            return str(error)
        return ""

    def plan(self, spec: ContainerSpec) -> list[dict[str, Any]]:
        """The operations as data."""
        return self._plan(spec).to_json()

    def _plan(self, spec: ContainerSpec) -> Plan:
        return plan_container(spec, controllers=self._controllers, unified=self._unified)

    async def launch(self, spec: ContainerSpec, slot: Slot, listen_fd: int) -> Launched:
        """See Launcher.launch."""
        spawner = await self._running()
        plan = self._plan(spec)
        with ExitStack() as opened:
            sources = await _sources(spec, opened)
            memfd = make_memfd("dsec-plan", plan.packed, opened)
            status, status_child = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            opened.callback(os.close, status)
            fds = _open_all(plan, spec, slot, {LISTEN: listen_fd} | sources, opened)
            try:
                launched = await spawner.request([memfd, status_child, *fds])
            finally:
                os.close(status_child)
            if launched.pidfd < 0:
                raise _failure(plan, launched.failed, launched.error, "")
            try:
                async with asyncio.timeout(LAUNCH_TIMEOUT_S):
                    word = await _read_word(status)
                report = unpack_report(os.pread(memfd, REPORT_BYTES, len(plan.packed) - REPORT_BYTES), len(plan.ops))
                if word != b"R":
                    raise _failure(plan, report.done, report.error or errno.ECHILD, report.detail)
            except BaseException as error:
                send_signal(launched.pidfd, signal.SIGKILL)
                os.close(launched.pidfd)
                if isinstance(error, TimeoutError):
                    raise DeadlineExceeded(
                        "launch_timeout", f"dsec-init was not ready within {LAUNCH_TIMEOUT_S:g} s"
                    ) from error
                raise
        return Launched(pid=launched.pid, pidfd=launched.pidfd, steps_ms=_steps(plan, report))

    async def forget(self, sandbox: str, runtime_dir: Path) -> None:
        """Nothing is kept: all of a container is in its namespaces and cgroups."""

    async def _running(self) -> Spawner:
        if self._spawner is None or self._spawner.ended:
            if self._spawner is not None:
                self._spawner.close()
            self._spawner = Spawner(self._binary)
        return self._spawner

    async def close(self) -> None:
        """End the C process; its sandboxes live on."""
        if self._spawner is not None:
            self._spawner.close()
            self._spawner = None


async def _sources(spec: ContainerSpec, opened: ExitStack) -> dict[str, int]:
    """Mounts of the host, with owners as they are to be inside."""
    if not spec.mounts:
        return {}
    wanted = [(str(mount.source), mount.owners) for mount in spec.mounts]
    opening = asyncio.ensure_future(asyncio.to_thread(open_sources, wanted, spec.uid_base))
    try:
        fds = await asyncio.shield(opening)
    except asyncio.CancelledError:  # the thread goes on, and what it opens has no other owner
        opening.add_done_callback(_close_opened)
        raise
    for fd in fds:
        opened.callback(os.close, fd)
    return {mount_fd(index): fd for index, fd in enumerate(fds)}


def _close_opened(opening: asyncio.Future[list[int]]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        for fd in opening.result():
            os.close(fd)


def _open_all(plan: Plan, spec: ContainerSpec, slot: Slot, given: Mapping[str, int], opened: ExitStack) -> list[int]:
    """The descriptors that the plan names, in its order; those opened here are closed by `opened`."""
    known = {UNIFIED: slot.cgroup_fd, NETNS: slot.net.fd, **given}
    paths: dict[str, tuple[str, int]] = {
        procs_fd(name): (f"{path}/cgroup.procs", os.O_WRONLY) for name, path in slot.cgroup.paths.items()
    } | {OOM: (slot.cgroup.oom_file, os.O_RDONLY)}
    trees = {ROOTFS: str(spec.rootfs)}
    if isinstance(spec.upper, DirUpper):
        trees[LAYER] = str(spec.upper.path)
    fds: list[int] = []
    for name in plan.fds:
        fd = known.get(name)
        if fd is None:
            fd = open_tree(trees[name], OPEN_TREE_CLONE) if name in trees else _open(*paths[name])
            opened.callback(os.close, fd)
        fds.append(fd)
    return fds


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC)


async def _read_word(fd: int) -> bytes:
    """One byte of the status pipe; empty when the process died without a word."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return os.read(fd, 1)
        except BlockingIOError:
            ready = loop.create_future()
            loop.add_reader(fd, _wake, ready)
            try:
                await ready
            finally:
                loop.remove_reader(fd)


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _steps(plan: Plan, report: Report) -> dict[str, float]:
    """Milliseconds by kind of operation: a plan has dozens, of which a reader wants the sums."""
    steps: dict[str, float] = {}
    last = 0
    for op, end in zip(plan.ops, report.ends_us, strict=True):
        if end:
            steps[op.name] = steps.get(op.name, 0.0) + (end - last) / 1000
            last = end
    return steps


def _failure(plan: Plan, index: int, number: int, detail: str) -> PlatformError | UsageError:
    if index == _NO_OP or index >= len(plan.ops):
        hint = "it was built from other sources: run python hatch_build.py" if number == errno.EPROTO else ""
        return PlatformError("launch_failed", f"dsec-init launch refused the request: {os.strerror(number)}", hint=hint)
    op = plan.ops[index]
    details = {"step": op.step, "errno": errno.errorcode.get(number, str(number)), "detail": detail}
    if op.name in ("pin", "readonly") and number == errno.ENOENT:
        return UsageError(
            "protected_path_missing",
            f"{op.step.partition(' ')[2]} is not in the image, so it can't be protected",
            field="policy.protected_paths",
            hint="name a file or directory of the image, or leave it out",
            details=details,
        )
    what = f"{op.step} ({detail})" if detail and detail not in op.step else op.step
    return PlatformError("launch_failed", f"step {what}: {os.strerror(number)}", details=details)
