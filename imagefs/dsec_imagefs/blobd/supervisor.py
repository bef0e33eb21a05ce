"""The process that holds the descriptors: mounts, forks workers, replaces dead ones. It reads no blob and no socket.

It and its worker watch each other. A worker that loses its supervisor becomes one itself, by exec, with the same
descriptors; so only when both die within an instant are the mount and its readers lost (EIO, never wrong bytes).
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import select
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from dsec_imagefs.blobd import connection
from dsec_imagefs.blobd.control import Control, listen
from dsec_imagefs.blobd.fuse_wire import Negotiated
from dsec_imagefs.blobd.shared import SharedState
from dsec_imagefs.blobd.source import open_store
from dsec_imagefs.blobd.verbs import Verbs
from dsec_imagefs.blobd.worker import Inherited, Worker
from dsec_imagefs.errors import SyscallError
from dsec_imagefs.syscalls import MNT_DETACH, umount

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsec_imagefs.blobd.settings import Places, Settings
    from dsec_imagefs.blobd.source import OpenStore

log = logging.getLogger("dsec.blobd")
_QUICK_S = 5.0  # a worker that lives shorter counts as a quick death
_STOP_TIMEOUT_S = 10.0
_CLEAN, _REPLACE, _FAILED = 0, 71, 72


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """What an exec hands over, as JSON in argv: descriptors by number, and what was settled."""

    fuse_fd: int
    listen_fd: int
    shared_fd: int
    lock_fd: int
    minor: int
    flags: int
    mount_id: str

    def render(self) -> str:
        """For argv."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Adopted:
        """The other way."""
        return cls(**json.loads(text))


class Supervisor:
    """One store root's. `run` returns when it was told to stop."""

    def __init__(
        self, places: Places, settings: Settings, lock_fd: int, *, argv: Sequence[str], opener: OpenStore = open_store
    ) -> None:
        """Nothing is mounted yet. `argv` starts this program again, without ``--adopt``."""
        self._places = places
        self._settings = settings
        self._lock_fd = lock_fd
        self._argv = list(argv)
        self._opener = opener
        self._stop = False
        self._quick_deaths = 0
        self._fuse_fd = -1
        self._negotiated: Negotiated
        self._mount_id = ""
        self._listener: socket.socket
        self._shared: SharedState

    def begin(self, adopted: Adopted | None) -> None:
        """Mount anew, or go on with what another process left us."""
        if adopted is None:
            self._shared = SharedState.create()
            self._listener = listen(self._places.socket)
            connection.detach_stale(self._places.mount)
            self._mount()
            return
        self._shared = SharedState(adopted.shared_fd)
        self._listener = socket.socket(fileno=adopted.listen_fd)
        self._fuse_fd = adopted.fuse_fd
        self._negotiated = Negotiated(minor=adopted.minor, flags=adopted.flags)
        self._mount_id = adopted.mount_id
        for fd in (adopted.fuse_fd, adopted.listen_fd, adopted.shared_fd, adopted.lock_fd):
            os.set_inheritable(fd, False)
        self._shared.count_death()

    def _mount(self) -> None:
        self._fuse_fd, self._negotiated = connection.mount_blobs(
            self._places.mount, resend=self._settings.resend, passthrough=self._settings.passthrough
        )
        self._mount_id = secrets.token_hex(8)
        self._shared.clear()
        log.info("mounted %s, mount_id=%s", self._places.mount, self._mount_id)

    def run(self, *, adopted: bool) -> None:
        """Keep a worker running until SIGTERM or SIGINT, then unmount."""
        signal.signal(signal.SIGTERM, self._asked)
        signal.signal(signal.SIGINT, self._asked)
        resend = adopted
        try:
            while not self._stop:
                started = time.monotonic()
                self._shared.beat()
                pid = self._fork(resend=resend)
                code = self._watch(pid)
                if self._stop or code == _CLEAN:
                    break
                self._shared.count_death()
                log.warning("worker pid=%d ended with %s", pid, code)
                resend = True
                self._after_death(time.monotonic() - started)
        finally:
            self._end()

    def _asked(self, number: int, frame: object) -> None:
        del number, frame
        self._stop = True

    def _fork(self, *, resend: bool) -> int:
        supervisor = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        code = _FAILED
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            code = self._be_worker(supervisor, resend=resend)
        except BaseException:
            log.exception("the worker failed")
        finally:
            os._exit(code)

    def _be_worker(self, supervisor: int, *, resend: bool) -> int:
        inherited = Inherited(
            fuse_fd=self._fuse_fd,
            listen_fd=self._listener.fileno(),
            shared=self._shared,
            negotiated=self._negotiated,
            mount_id=self._mount_id,
            supervisor_pid=supervisor,
        )
        worker = Worker(self._places, self._settings, inherited, self._opener)
        signal.signal(signal.SIGTERM, lambda *_: worker.stopping.set())
        watch = threading.Thread(target=self._watch_supervisor, args=(worker, supervisor), name="watch", daemon=True)
        watch.start()
        worker.start(resend=resend)
        asked = threading.Event()  # by the verb; SIGTERM to a worker alone only replaces it

        def stop() -> None:
            asked.set()
            worker.stopping.set()

        Control(self._listener, Verbs(worker, stop), worker.counters).start()
        worker.run_clock()
        return _CLEAN if asked.is_set() else _REPLACE

    def _watch_supervisor(self, worker: Worker, pid: int) -> None:
        """In the worker: take the supervisor's place when it dies."""
        with suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            if os.getppid() == pid:
                select.select([pidfd], [], [])
            os.close(pidfd)
        if not worker.stopping.is_set():
            log.warning("supervisor pid=%d died; worker pid=%d takes its place", pid, os.getpid())
            self.exec_again()

    def exec_again(self) -> None:
        """Become a supervisor: exec ends all threads; what they had taken is resent to our worker."""
        adopted = Adopted(
            fuse_fd=self._fuse_fd,
            listen_fd=self._listener.fileno(),
            shared_fd=self._shared.fd,
            lock_fd=self._lock_fd,
            minor=self._negotiated.minor,
            flags=self._negotiated.flags,
            mount_id=self._mount_id,
        )
        for fd in (adopted.fuse_fd, adopted.listen_fd, adopted.shared_fd, adopted.lock_fd):
            os.set_inheritable(fd, True)
        os.execv(self._argv[0], [*self._argv, "--adopt", adopted.render()])  # noqa: S606

    def _watch(self, pid: int) -> int:
        """Wait for a worker's end, and bring it about when it hangs or we shall stop; its exit code, or -signal."""
        pidfd = os.pidfd_open(pid)
        stop_at = 0.0
        try:
            while True:
                ready = select.select([pidfd], [], [], 0.2)[0]  # signals end it early only in later Pythons
                if ready:
                    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                now = time.monotonic()
                if self._stop and not stop_at:
                    stop_at = now + _STOP_TIMEOUT_S
                    os.kill(pid, signal.SIGTERM)
                hangs = self._shared.silent_s() > self._settings.heartbeat_s
                if hangs or (stop_at and now > stop_at):
                    log.error("worker pid=%d %s: killed", pid, "shows no life" if hangs else "does not end")
                    os.kill(pid, signal.SIGKILL)
                    self._shared.beat()
        finally:
            os.close(pidfd)

    def _after_death(self, lived_s: float) -> None:
        """A pause after quick deaths; after many, or where requests can't be resent, an end to waiting."""
        self._quick_deaths = self._quick_deaths + 1 if lived_s < _QUICK_S else 0
        number = connection.connection_number(self._places.mount)
        lost = not self._negotiated.resend and connection.may_wait(number)
        if lost or self._quick_deaths >= self._settings.quick_deaths:
            # Before Linux 6.9 what a dead worker had taken is lost: its readers would wait for ever.
            log.error("connection=%d is given up: its readers get EIO; images on it must be mounted again", number)
            self._quick_deaths = 0
            os.close(self._fuse_fd)  # the last one: every reader gets an error now
            with suppress(SyscallError):
                umount(self._places.mount, MNT_DETACH)
            self._mount()
        elif self._quick_deaths > 1:
            time.sleep(min(2.0, 0.02 * 2**self._quick_deaths))

    def _end(self) -> None:
        with suppress(SyscallError):
            umount(self._places.mount, MNT_DETACH)
        os.close(self._fuse_fd)
        self._places.socket.unlink(missing_ok=True)
        self._listener.close()


def is_supported() -> tuple[bool, str]:
    """Whether a blob server can run here, and why not. Found by asking for what it needs, nothing is mounted."""
    if os.geteuid() != 0:
        return False, "mounting needs root"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as err:
        return False, f"/dev/fuse can't be opened: {err.strerror}"
    return True, ""
