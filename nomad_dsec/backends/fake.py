"""A backend without isolation, for tests of node, gateway and SDK: dsec-init on a scratch copy of the host's root.

Real in what those rooms rely on (own process that outlives the daemon, handle, recover, pause, files, execs), and in
nothing else: no limits, no policy, no users, the host's network. Offered only when `node.backends` says `fake`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libdsec.errors import PlatformError
from libdsec.wire import BackendFingerprint, Metrics

from nomad_dsec.backends.base import Ended, Fate, Recovered, Started
from nomad_dsec.guest.channel import GuestChannel
from nomad_dsec.linux.pidfd import open_pidfd, open_same_process, send_signal, wait_ended
from nomad_dsec.linux.procfs import boot_id, start_time, status
from nomad_dsec.linux.syscalls import MNT_DETACH, MS_BIND, MS_REC, mount, umount2
from nomad_dsec.model import HANDLE_VERSION, Handle
from nomad_dsec.proc import tool_environment

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from nomad_dsec.backends.base import Steps
    from nomad_dsec.model import SandboxSpec

PREFIX = "fake-"
READY_S = 20.0
GONE_S = 10.0
DELAY = "DSEC_FAKE_DELAY_S"  # in spec.env: a slow start, for tests
FAIL = "DSEC_FAKE_FAIL"  # in spec.env: `before` or `after` the resources are made, for tests
_UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--kill-child")


class FakeBackend:
    """Sandboxes below one directory. It answers to the name of the backend whose place it takes."""

    def __init__(self, directory: Path, init_binary: Path, *, name: str = "container") -> None:
        self.name = name
        self._dir = directory
        self._binary = init_binary
        self._channels: dict[str, GuestChannel] = {}
        self._reason: str | None = None

    async def fingerprint(self) -> BackendFingerprint:
        """See Backend."""
        if self._reason is None:
            self._reason = await asyncio.to_thread(self._probe)
        return BackendFingerprint(
            name=self.name,
            available=not self._reason,
            reason=self._reason,
            features=["pause", "files", "exec", "pty"] if not self._reason else [],
            attributes={"launcher": "fake", "isolation": "none"},
        )

    async def start(self, spec: SandboxSpec, journal: Callable[[Handle], Awaitable[None]], steps: Steps) -> Started:
        """See Backend. Cancelled or failing, it removes what it made."""
        run = self._dir / (PREFIX + spec.id)
        handle = Handle(
            version=HANDLE_VERSION,
            backend=self.name,
            sandbox=spec.id,
            incarnation=spec.incarnation,
            data={"dir": str(run), "boot_id": boot_id()},
        )
        await journal(handle)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.stop, handle)
            _fail_on_request(spec, "before")
            with steps.step("rootfs"):
                _make_root(run)
            with steps.step("launch"):
                pid = self._spawn(run)
            handle = _with_pid(handle, pid)
            with steps.step("ready"):
                await asyncio.sleep(float(spec.env.get(DELAY, "0")))
                await self._ready(handle)
            _fail_on_request(spec, "after")
            undo.pop_all()
        shown = {"profile": "none", "network": {"kind": "host"}, "unenforced": ["everything: this is the fake backend"]}
        return Started(handle=handle, policy=shown)

    async def recover(self, handle: Handle) -> Recovered:
        """See Backend."""
        if handle.data.get("boot_id") != boot_id():
            return Recovered(fate=Fate.LOST, reason="node_lost", message="the machine was restarted")
        init = _init_pid(handle)
        if init is None:
            return Recovered(fate=Fate.EXITED, reason="init_exited", message="its init is gone")
        state = (status(init) or {}).get("State", "")
        if state.startswith("T"):
            return Recovered(fate=Fate.PAUSED)
        try:
            await self._ready(handle)
        except PlatformError as error:
            return Recovered(fate=Fate.LOST, reason="error(recover)", message=str(error))
        return Recovered(fate=Fate.RUNNING)

    async def connect(self, handle: Handle) -> GuestChannel:
        """See Backend."""
        channel = self._channels.get(handle.sandbox)
        if channel is None or channel.closed:
            path = Path(handle.data["dir"]) / "init.sock"
            channel = await GuestChannel.connect(lambda: _connect(path), timeout_s=5.0)
            self._channels[handle.sandbox] = channel
        return channel

    async def wait_ended(self, handle: Handle) -> Ended:
        """See Backend."""
        pidfd = _open_keeper(handle)
        if pidfd is not None:
            try:
                await wait_ended(pidfd)
            finally:
                os.close(pidfd)
            _reap(handle.data["pid"])
        return Ended(reason="init_exited", message="its init ended by itself")

    async def stop(self, handle: Handle) -> None:
        """See Backend."""
        channel = self._channels.pop(handle.sandbox, None)
        if channel is not None:
            await channel.close()
        run = Path(handle.data["dir"])
        for pid in _keepers(handle):
            await _kill(pid)
        await asyncio.to_thread(_remove_root, run)

    async def stats(self, handle: Handle) -> Metrics:
        """See Backend. Only the number of processes is known."""
        init = _init_pid(handle)
        return Metrics(pids=len(_members(init)) if init is not None else 0, at=time.time())

    async def sweep(self, keep: Sequence[Handle]) -> list[str]:
        """See Backend."""
        kept = {handle.data["dir"] for handle in keep}
        removed = []
        for run in sorted(self._dir.glob(PREFIX + "*")):
            if str(run) in kept:
                continue
            data: dict[str, Any] = {"dir": str(run)}
            name = run.name.removeprefix(PREFIX)
            await self.stop(Handle(version=HANDLE_VERSION, backend=self.name, sandbox=name, incarnation=0, data=data))
            removed.append(f"sandbox directory {run}")
        return removed

    async def pause(self, handle: Handle) -> None:
        """Stop every process of it; ones that are forked meanwhile are found in the next round."""
        init = _init_pid(handle)
        if init is None:
            raise PlatformError("pause_failed", f"{handle.sandbox} has no init")
        stopped: set[int] = set()
        while fresh := _members(init) - stopped:
            for pid in fresh:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= fresh

    async def resume(self, handle: Handle) -> None:
        """Let all of them go on."""
        init = _init_pid(handle)
        if init is None:
            raise PlatformError("resume_failed", f"{handle.sandbox} has no init")
        for pid in _members(init):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def plan(self, spec: SandboxSpec) -> list[dict[str, Any]]:
        """See Planned."""
        run = str(self._dir / (PREFIX + spec.id))
        return [{"op": "overlay", "lower": "/", "target": f"{run}/root"}, {"op": "spawn", "argv": self._argv(run)}]

    async def close(self) -> None:
        """See Backend."""
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    def _probe(self) -> str:
        if os.geteuid() != 0:
            return "not root"
        if not self._binary.is_file():
            return f"{self._binary} is not built"
        return "" if shutil.which(_UNSHARE[0]) else "unshare is not installed"

    def _argv(self, run: str) -> list[str]:
        return [*_UNSHARE, f"--root={run}/root", "--mount-proc", "/proc/self/fd/4", "serve", "--fd", "3"]

    def _spawn(self, run: Path) -> int:
        """Start the keeper with fd 3 the listening socket and fd 4 the binary; both survive the daemon."""
        directory = os.open(run, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        binary = os.open(self._binary, os.O_RDONLY | os.O_CLOEXEC)
        log = os.open(run / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(f"/proc/self/fd/{directory}/init.sock")  # the real path may be too long for sun_path
                listener.listen(64)
                # Twice: first out of the way of 3 and 4, where any of these may be already.
                moves = [(os.POSIX_SPAWN_DUP2, old, new) for old, new in ((listener.fileno(), 103), (binary, 104))]
                final = [(os.POSIX_SPAWN_DUP2, 103, 3), (os.POSIX_SPAWN_DUP2, 104, 4)]
                outputs = [(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
                closes = [(os.POSIX_SPAWN_CLOSE, 103), (os.POSIX_SPAWN_CLOSE, 104)]
                null = [(os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0)]
                argv = self._argv(str(run))
                return os.posix_spawnp(
                    argv[0],
                    argv,
                    tool_environment(),
                    file_actions=[*moves, *outputs, *final, *closes, *null],
                    setsid=True,
                )
        finally:
            for fd in (directory, binary, log):
                os.close(fd)

    async def _ready(self, handle: Handle) -> None:
        try:
            async with asyncio.timeout(READY_S):
                await (await self.connect(handle)).ping()
        except TimeoutError as late:
            log_text = (Path(handle.data["dir"]) / "log").read_text("utf-8", "replace")[-500:]
            raise PlatformError("launch_failed", f"dsec-init does not answer: {log_text}") from late


def _fail_on_request(spec: SandboxSpec, step: str) -> None:
    if spec.env.get(FAIL) == step:
        raise PlatformError("launch_failed", f"{FAIL}={step} was asked for")


def _with_pid(handle: Handle, pid: int) -> Handle:
    data = {**handle.data, "pid": pid, "start": start_time(pid)}
    return Handle(
        version=handle.version,
        backend=handle.backend,
        sandbox=handle.sandbox,
        incarnation=handle.incarnation,
        data=data,
    )


def _make_root(run: Path) -> None:
    """An overlay of the host's root with a writable layer in memory, and the host's /dev."""
    run.mkdir(parents=True, mode=0o700)
    mount("dsec-fake", str(run), "tmpfs", 0, "mode=0700")
    for part in ("upper", "work", "root"):
        (run / part).mkdir()
    mount("dsec-fake", str(run / "root"), "overlay", 0, f"lowerdir=/,upperdir={run}/upper,workdir={run}/work")
    mount("/dev", str(run / "root/dev"), None, MS_BIND | MS_REC)
    for part in ("tmp", "run"):
        mount("dsec-fake", str(run / "root" / part), "tmpfs", 0, "mode=1777")


def _remove_root(run: Path) -> None:
    while os.path.ismount(run):
        umount2(str(run), MNT_DETACH)
    shutil.rmtree(run, ignore_errors=True)


def _open_keeper(handle: Handle) -> int | None:
    """A pidfd of the process that holds the sandbox, None when it is gone."""
    pid, start = handle.data.get("pid"), handle.data.get("start")
    return open_same_process(pid, start) if pid and start else None


def _keepers(handle: Handle) -> list[int]:
    """The handle's process, or, when the daemon died before it knew the pid, the one whose command line says so."""
    pid = handle.data.get("pid")
    if pid:
        fd = _open_keeper(handle)
        if fd is None:
            return []
        os.close(fd)
        return [int(pid)]
    word = f"--root={handle.data['dir']}/root".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if word in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def _init_pid(handle: Handle) -> int | None:
    fd = _open_keeper(handle)
    if fd is None:
        return None
    os.close(fd)
    return _child(int(handle.data["pid"]))


def _child(pid: int) -> int | None:
    with suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else None
    return None


def _members(init: int) -> set[int]:
    """Every process in the pid namespace of `init`."""
    namespace = _namespace(Path(f"/proc/{init}"))
    if not namespace:
        return set()
    return {int(path.name) for path in Path("/proc").glob("[0-9]*") if _namespace(path) == namespace}


def _namespace(process: Path) -> str:
    try:
        return str((process / "ns/pid").readlink())
    except OSError:
        return ""


async def _kill(pid: int) -> None:
    """Kill keeper and init and wait until both are dead: init's death takes all of its namespace along."""
    fds = []
    for each in (_child(pid), pid):
        if each is not None:
            with suppress(ProcessLookupError):
                fds.append(open_pidfd(each))
    try:
        for fd in fds:
            send_signal(fd, signal.SIGKILL)
        async with asyncio.timeout(GONE_S):
            for fd in fds:
                await wait_ended(fd)
    finally:
        for fd in fds:
            os.close(fd)
    _reap(pid)


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


async def _connect(path: Path) -> socket.socket:
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, f"/proc/self/fd/{directory}/{path.name}")
    except BaseException:
        sock.close()
        raise
    finally:
        os.close(directory)
    return sock
