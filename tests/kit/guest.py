"""A real dsec-init in a pid and mount namespace (and a cgroup) of its own, and a channel to it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from contextlib import asynccontextmanager, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nomad_dsec.guest import build
from nomad_dsec.guest.channel import GuestChannel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

BIN = Path(build.__file__).parent / "bin"
UNIFIED = Path("/sys/fs/cgroup/unified")


@lru_cache
def binary(kind: str) -> Path:
    """dsec-init as "release" or "sanitized"; compiled when it is not there yet."""
    if kind == "sanitized":
        return build.build(BIN / "sanitized", sanitize=True)
    return build.build(BIN)


class Guest:
    """One running dsec-init: its socket path, its pid on the host, and a first channel."""

    def __init__(
        self, process: subprocess.Popen[bytes], socket: Path, channel: GuestChannel, *, sanitized: bool
    ) -> None:
        self.process = process
        self.cgroup: Path | None = None
        self.sanitized = sanitized
        self.socket = socket
        self.channel = channel

    @property
    def pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def rss_kib(self) -> int:
        """Anonymous resident memory of PID 1."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1])
        raise AssertionError("no RssAnon")

    async def connect(self) -> GuestChannel:
        """Another connection."""
        return await GuestChannel.connect(self.socket)


def _cgroup_root() -> Path:
    return UNIFIED if (UNIFIED / "cgroup.procs").exists() else Path("/sys/fs/cgroup")


def _remove_cgroup(cgroup: Path) -> None:
    (cgroup / "cgroup.kill").write_text("1")
    for child in [*cgroup.glob("x*"), cgroup]:
        for _ in range(200):
            try:
                child.rmdir()
                break
            except FileNotFoundError:
                break
            except OSError:
                os.sched_yield()


@asynccontextmanager
async def running_guest(
    kind: str = "release", *args: str, cgroup: bool = True, expect_clean: bool = True, oom_file: Path | None = None
) -> AsyncIterator[Guest]:
    """Start, connect; at the end shut down and see that it ended well (a sanitizer's finding would show)."""
    with tempfile.TemporaryDirectory(prefix="dsec-guest-") as scratch:
        socket = Path(scratch) / "s"
        argv = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc", str(binary(kind)), "serve"]
        argv += ["--listen", str(socket), *args]
        fds: list[int] = []
        group: Path | None = None
        if cgroup:
            group = _cgroup_root() / f"dsec-guest-test-{os.getpid()}-{socket.parent.name}"
            group.mkdir()
            fds.append(os.open(group, os.O_RDONLY | os.O_DIRECTORY))
            argv += ["--cgroup-fd", str(fds[0])]
        if oom_file is not None:
            fds.append(os.open(oom_file, os.O_RDONLY))
            argv += ["--oom-fd", str(fds[-1])]
        log = Path(scratch) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                argv, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        for fd in fds:
            os.close(fd)
        try:
            channel = await _first_connection(process, socket, log)
            guest = Guest(process, socket, channel, sanitized=kind == "sanitized")
            guest.cgroup = group
            yield guest
            if expect_clean:
                last = await GuestChannel.connect(socket)
                await last.shutdown()
                await last.close()
            await channel.close()
            code = await asyncio.to_thread(process.wait, 10)
            assert not expect_clean or code == 0, f"dsec-init ended with {code}: {log.read_text()}"
            findings = log.read_text()
            assert "Sanitizer" not in findings, findings
            assert "runtime error" not in findings, findings
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(10)
            if group is not None:
                _remove_cgroup(group)


async def _first_connection(process: subprocess.Popen[bytes], socket: Path, log: Path) -> GuestChannel:
    async with asyncio.timeout(15):
        while True:
            if process.poll() is not None:
                raise AssertionError(f"dsec-init ended with {process.returncode}: {log.read_text()}")
            try:
                return await GuestChannel.connect(socket)
            except Exception:
                await asyncio.sleep(0.01)


@contextmanager
def open_room() -> Iterator[Path]:
    """A directory that every user can reach: pytest's own are for root only."""
    with tempfile.TemporaryDirectory(prefix="dsec-guest-room-", dir="/tmp") as made:
        Path(made).chmod(0o777)
        yield Path(made)


async def read(channel: GuestChannel, path: Any, *args: Any, **more: Any) -> bytes:
    """A whole file."""
    return b"".join([piece async for piece in channel.read_file(path, *args, **more)])


async def pieces(data: bytes, size: int = 50_000) -> AsyncIterator[bytes]:
    """Data as a sender has it: bit by bit."""
    for at in range(0, len(data), size):
        yield data[at : at + size]


def code_of(caught: Any) -> str:
    """The code of an error that pytest.raises caught."""
    code: str = caught.value.code
    return code
