"""The `oci:<runtime>` launcher: a generated bundle, started by crun or runc, with dsec-init as its process.

For hosts that want a standard runtime, and as the yardstick of the native launcher. The runtime creates and starts, and
is not asked again: killing, freezing, limits and accounting go through the slot's cgroups, as with the native launcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import json
import os
import re
import resource
import shutil
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from libdsec.errors import DeadlineExceeded, PlatformError, UsageError

from nomad_dsec import proc
from nomad_dsec.backends.container import oci_bundle
from nomad_dsec.backends.container.launcher import Launched, Slot
from nomad_dsec.backends.container.plan_ops import REPORT_BYTES, unpack_report
from nomad_dsec.linux.cgroup import remove_tree
from nomad_dsec.linux.memfd import make_memfd
from nomad_dsec.linux.procfs import status as process_status

if TYPE_CHECKING:
    from nomad_dsec.backends.container.plan_ops import Op
    from nomad_dsec.backends.container.spec import ContainerSpec
    from nomad_dsec.linux.cgroup_files import Layout

RUNTIMES: Final = ("crun", "runc", "runsc")
LAUNCH_TIMEOUT_S: Final = 40.0
_OLDEST: Final = {"crun": (1, 5), "runc": (1, 1)}
_CAP_SYS_RESOURCE: Final = 24
_KILL_TIMEOUT_S: Final = 10.0


class OciLauncher:
    """Starts containers through one OCI runtime, found on PATH."""

    def __init__(self, runtime: str, binary: Path, layout: Layout) -> None:
        if runtime not in RUNTIMES:
            raise UsageError(
                "bad_launcher",
                f"no OCI runtime {runtime!r}",
                field="node.launcher",
                hint=f"oci: and one of {', '.join(RUNTIMES)}",
            )
        self.name = f"oci:{runtime}"
        self._runtime = runtime
        self._binary = binary
        self._layout = layout

    async def probe(self) -> str:
        """Empty when the runtime is there and new enough; that it starts containers is seen at the first start."""
        if self._runtime == "runsc":
            # Seen with runsc 20221219 (ptrace, Linux 6.18): dsec-init starts, and serves on a socket of a bind-mounted
            # directory (--host-uds=all). But openat2 is ENOSYS, on which every path of files and cwd rests; the socket
            # of PID 1 would be a name inside; and without user.max_*_namespaces the policy's probe finds them open.
            return "gVisor has no openat2(2) and no user.max_*_namespaces, on which files and the policy rest"
        if shutil.which(self._runtime) is None:
            return f"{self._runtime} is not on PATH: install it"
        said = (await proc.run_async([self._runtime, "--version"], timeout_s=10)).stdout.decode("utf-8", "replace")
        found = re.search(r"version (\d+)\.(\d+)", said)
        oldest = _OLDEST[self._runtime]
        if found is None or (int(found[1]), int(found[2])) < oldest:
            return f"{self._runtime} is older than {oldest[0]}.{oldest[1]}: {said.splitlines()[:1]}"
        return "" if self._binary.exists() else f"{self._binary} is not there: build it (python hatch_build.py)"

    def plan(self, spec: ContainerSpec) -> list[dict[str, Any]]:
        """The preparation, config.json, and what dsec-init does itself."""
        return oci_bundle.describe(spec, self._facts(None), unified=bool(self._layout.unified))

    async def launch(self, spec: ContainerSpec, slot: Slot, listen_fd: int) -> Launched:
        """See Launcher.launch."""
        ops = oci_bundle.inside_ops(spec, unified=slot.cgroup_fd >= 0)
        packed = oci_bundle.pack_inside(ops)
        with ExitStack() as opened:
            plan_fd = make_memfd("dsec-plan", packed, opened)
            image_fd = make_memfd("dsec-init", self._binary.read_bytes(), opened, sealed=True)
            ready, ready_child = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            opened.callback(os.close, ready)
            child_end = opened.enter_context(contextlib.closing(os.fdopen(ready_child, "wb", buffering=0)))
            cgroup_fd = slot.cgroup_fd
            if cgroup_fd < 0:  # keeps the numbers of the others
                cgroup_fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
                opened.callback(os.close, cgroup_fd)
            oom_fd = os.open(slot.cgroup.oom_file, os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, oom_fd)
            fds = [listen_fd, cgroup_fd, oom_fd, plan_fd, image_fd, ready_child]
            try:
                async with asyncio.timeout(LAUNCH_TIMEOUT_S):
                    reply = await self._stage(self._request(spec, slot, fds), [*fds, slot.net.fd])
                    if "pid" not in reply:
                        raise _failure(reply, self.name)
                    child_end.close()
                    word = await _read_word(ready)
                    if word != b"R":
                        raise _inside_failure(os.pread(plan_fd, REPORT_BYTES, len(packed) - REPORT_BYTES), ops)
                    pid = int(reply["pid"])
                    pidfd = os.pidfd_open(pid)
            except BaseException as error:
                await asyncio.shield(self._undo(slot))
                if isinstance(error, TimeoutError):
                    raise DeadlineExceeded(
                        "launch_timeout", f"{self.name} did not start the container within {LAUNCH_TIMEOUT_S:g} s"
                    ) from error
                if isinstance(error, ProcessLookupError):
                    raise PlatformError(
                        "launch_failed", "dsec-init ended at once", details={"step": "serve"}
                    ) from error
                raise
        return Launched(pid=pid, pidfd=pidfd, steps_ms=reply["steps_ms"])

    async def _undo(self, slot: Slot) -> None:
        """Nothing of a launch that failed is left: no process, and none of the cgroups that runc makes elsewhere."""
        await slot.cgroup.kill(timeout_s=_KILL_TIMEOUT_S)
        for mounted in self._layout.foreign():
            if remove_tree(f"{mounted}/{_below_mount(slot)}"):
                with contextlib.suppress(OSError):
                    Path(mounted, _below_mount(slot)).parent.rmdir()

    def _facts(self, slot: Slot | None) -> oci_bundle.HostFacts:
        path = f"/{_below_mount(slot)}" if slot is not None and self._runtime == "runc" else ""
        return oci_bundle.HostFacts(hard_limits=_hard_limits(), may_protect=_may_protect(), cgroups_path=path)

    def _request(self, spec: ContainerSpec, slot: Slot, fds: list[int]) -> dict[str, Any]:
        hybrid = self._layout.mode == "hybrid"
        joins = [f"{path}/cgroup.procs" for path in slot.cgroup.paths.values()]
        return oci_bundle.stage_request(spec) | {
            "id": f"{spec.id}-{spec.incarnation}",
            "config": oci_bundle.render_config(spec, self._facts(slot)),
            # crun takes no cgroup work from us, and refuses a cgroup2 mount with controllers beside v1 ones.
            "runtime": ["crun", "--cgroup-manager=disabled"] if self._runtime == "crun" else [self._runtime],
            "hide": [self._layout.unified] if self._runtime == "crun" and hybrid else [],
            # runc joins what config.json names, and refuses a cgroup that its own process is in.
            "join": joins if self._runtime == "crun" else [],
            "leave": self._layout.foreign() if self._runtime == "runc" else [],
            "cgroup": _below_mount(slot),
            "fds": fds,
            "net_fd": slot.net.fd,
        }

    async def _stage(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Run oci_stage with the request; its reply. When cancelled, the process and what it started are killed."""
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "nomad_dsec.backends.container.oci_stage",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=sorted(set(fds)),
            env=proc.tool_environment({"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}),
            start_new_session=True,
        )
        try:
            stdout, stderr = await child.communicate(json.dumps(request).encode())
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                await child.wait()
        try:
            reply: dict[str, Any] = json.loads(stdout)
        except ValueError:
            said = stderr.decode("utf-8", "replace").strip()[-600:]
            reply = {"step": "stage", "errno": 0, "detail": f"ended with {child.returncode}: {said}", "subject": ""}
        return reply

    async def forget(self, sandbox: str, runtime_dir: Path) -> None:
        """Nothing is kept: bundle and runtime state were in the mount namespace of oci_stage."""

    async def close(self) -> None:
        """Nothing runs between launches."""


def _below_mount(slot: Slot) -> str:
    """The slot's cgroup as a path below each hierarchy's mount: dsec-<node>/<name>."""
    return "/".join(next(iter(slot.cgroup.paths.values())).split("/")[-2:])


@functools.cache
def _may_protect() -> bool:
    held = process_status(os.getpid()) or {}
    return bool(int(held.get("CapEff", "0"), 16) >> _CAP_SYS_RESOURCE & 1)


def _hard_limits() -> dict[str, int]:
    """Hard limits that can't be raised here; without CAP_SYS_RESOURCE that is all of them."""
    if _may_protect():
        return {}
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    limits = {name.removeprefix("RLIMIT_"): resource.getrlimit(getattr(resource, name))[1] for name in names}
    return {name: hard for name, hard in limits.items() if hard != resource.RLIM_INFINITY}


async def _read_word(fd: int) -> bytes:
    """One byte of the status pipe; empty when the process died without a word."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return os.read(fd, 1)
        except BlockingIOError:
            ready: asyncio.Future[None] = loop.create_future()
            loop.add_reader(fd, _wake, ready)
            try:
                await ready
            finally:
                loop.remove_reader(fd)


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _failure(reply: dict[str, Any], launcher: str) -> PlatformError | UsageError:
    step, number = str(reply["step"]), int(reply["errno"])
    details = {"step": step, "errno": errno.errorcode.get(number, ""), "detail": str(reply["detail"])[-600:]}
    if step == "protected" and number == errno.ENOENT:
        return UsageError(
            "protected_path_missing",
            f"{reply['subject']} is not in the image, so it can't be protected",
            field="policy.protected_paths",
            hint="name a file or directory of the image, or leave it out",
            details=details,
        )
    return PlatformError("launch_failed", f"{launcher}: step {step}: {details['detail']}", details=details)


def _inside_failure(raw: bytes, ops: tuple[Op, ...]) -> PlatformError:
    report = unpack_report(raw, len(ops))
    name = ops[report.done].step if report.done < len(ops) else "serve"
    code = errno.errorcode.get(report.error, "")
    details = {"step": name, "errno": code, "detail": report.detail}
    return PlatformError("launch_failed", f"dsec-init: step {name}: {code or 'ended'} {report.detail}", details=details)
