"""What the fake backend does to the host: scratch roots, its keeper processes, their signals. Tests only."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nomad_dsec.linux.pidfd import open_pidfd, open_same_process, send_signal, wait_ended
from nomad_dsec.linux.syscalls import MNT_DETACH, mount, umount2
from nomad_dsec.proc import tool_environment

if TYPE_CHECKING:
    from nomad_dsec.model import Handle

GONE_S = 10.0
_NODES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
_LINKS = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
_UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--kill-child")


def keeper_argv(run: str) -> list[str]:
    """unshare(1) holds the namespaces; dsec-init is PID 1 in them."""
    return [*_UNSHARE, f"--root={run}/root", "--mount-proc", "/proc/self/fd/4", "serve", "--fd", "3"]


def spawn_keeper(run: Path, init_binary: Path) -> int:
    """Start the keeper with fd 3 the listening socket and fd 4 the binary; both survive the daemon."""
    directory = os.open(run, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    binary = os.open(init_binary, os.O_RDONLY | os.O_CLOEXEC)
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
            argv = keeper_argv(str(run))
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


def make_root(run: Path) -> None:
    """An overlay of the host's root with a writable layer in memory, and a /dev of its own.

    Never the host's: there is one devtmpfs, and whoever removes what a dead daemon left would empty it for all.
    """
    run.mkdir(parents=True, mode=0o700)
    mount("dsec-fake", str(run), "tmpfs", 0, "mode=0700")
    for part in ("upper", "work", "root"):
        (run / part).mkdir()
    mount("dsec-fake", str(run / "root"), "overlay", 0, f"lowerdir=/,upperdir={run}/upper,workdir={run}/work")
    for part in ("tmp", "run"):
        mount("dsec-fake", str(run / "root" / part), "tmpfs", 0, "mode=1777")
    _make_dev(run / "root/dev")


def _make_dev(dev: Path) -> None:
    mount("dsec-fake", str(dev), "tmpfs", 0, "mode=755")
    for name, (major, minor) in _NODES.items():
        os.mknod(dev / name, stat.S_IFCHR | 0o666, os.makedev(major, minor))
        (dev / name).chmod(0o666)
    for name, target in _LINKS.items():
        (dev / name).symlink_to(target)
    (dev / "pts").mkdir()
    mount("devpts", str(dev / "pts"), "devpts", 0, "newinstance,ptmxmode=0666,mode=620")
    (dev / "shm").mkdir()
    (dev / "shm").chmod(0o1777)


def remove_root(run: Path) -> None:
    """Unmount all of it, busy or not, and remove the directory. Idempotent."""
    while os.path.ismount(run):
        umount2(str(run), MNT_DETACH)
    shutil.rmtree(run, ignore_errors=True)


def open_keeper(handle: Handle) -> int | None:
    """A pidfd of the process that holds the sandbox, None when it is gone."""
    pid, start = handle.data.get("pid"), handle.data.get("start")
    return open_same_process(pid, start) if pid and start else None


def keepers(handle: Handle) -> list[int]:
    """The handle's process, or, when the daemon died before it knew the pid, the one whose command line says so."""
    pid = handle.data.get("pid")
    if pid:
        fd = open_keeper(handle)
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


def init_pid(handle: Handle) -> int | None:
    """PID 1 of the sandbox as the host counts, None when it is gone."""
    fd = open_keeper(handle)
    if fd is None:
        return None
    os.close(fd)
    return _child(int(handle.data["pid"]))


def _child(pid: int) -> int | None:
    with suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else None
    return None


def members(init: int) -> set[int]:
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


async def kill(pid: int) -> None:
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
    reap(pid)


def reap(pid: int) -> None:
    """Collect the exit status if it is our child."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


async def connect(path: Path) -> socket.socket:
    """A connected socket; the path may be longer than sun_path."""
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
