"""The caller's end of the control socket, and starting a server that outlives the caller."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from dsec_imagefs.blobd.framing import receive, send
from dsec_imagefs.blobd.settings import Places, Settings
from dsec_imagefs.durable import try_lock
from dsec_imagefs.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from dsec_imagefs.blobd.spec import BlobSpec

START_TIMEOUT_S = 20.0
_POLL_S = 0.02
_TRIES = 3


class BlobdError(ImageError):
    """The server refused, or can't be reached (code ``unavailable``)."""


class BlobClient:
    """One call, one connection; safe between threads. Every verb may be repeated, so a restart is not noticed."""

    def __init__(self, root: Path, *, timeout_s: float = 30.0) -> None:
        self._places = Places(root=root)
        self._timeout_s = timeout_s

    def attach(self, blob: BlobSpec, *, user: str = "", record_s: float = 0.0) -> dict[str, Any]:
        """Serve a blob. `user` also takes a hold, `record_s` starts recording.

        Returns:
            ``direct`` and ``mapped`` (absolute paths of its two files), ``complete`` (bool), ``present_bytes``,
            ``mount_id``.

        Raises:
            BlobdError: ``conflict`` when attached differently, ``not_found`` or ``corrupt`` for its index.
        """
        return self._call("attach", blob=blob.to_json(), user=user, record_s=record_s)

    def detach(self, digest: str) -> None:
        """Serve it no more; its cached blocks stay. BlobdError ``in_use`` when held or open."""
        self._call("detach", digest=digest)

    def hold(self, digest: str, user: str) -> None:
        """Note that `user` (an image mount) stands on the blob: no eviction of a complete file, no detaching."""
        self._call("hold", digest=digest, user=user)

    def drop(self, digest: str, user: str) -> None:
        """Give a hold back; unknown ones are fine."""
        self._call("drop", digest=digest, user=user)

    def prefetch(
        self,
        digest: str,
        ranges: Iterable[tuple[int, int]] | None = None,
        *,
        priority: int = 10,
        wait_s: float = 0.0,
    ) -> dict[str, Any]:
        """Fetch ranges (offset, length) in the background, lower priorities first, always after demand.

        Args:
            digest: an attached blob.
            ranges: None is all of it.
            priority: 2 to 100.
            wait_s: wait so long for it to be done.

        Returns:
            ``queued`` (blocks that were not there), ``left`` (of them, still not there), ``failed``.
        """
        pairs = None if ranges is None else [list(one) for one in ranges]
        return self._call(
            "prefetch", digest=digest, ranges=pairs, priority=priority, wait_s=wait_s, timeout_s=wait_s + 30
        )

    def evict(self, *, digest: str = "", bytes_wanted: int = 0) -> int:
        """Free one blob's blocks, or about so many bytes of the least used; returns bytes freed.

        A complete blob loses its blocks only when named; BlobdError ``in_use`` when it is held or open.
        """
        return int(self._call("evict", digest=digest, bytes_wanted=bytes_wanted)["freed_bytes"])

    def verify(self, digest: str) -> dict[str, Any]:
        """Hash every present block again and drop wrong ones: ``checked``, ``bad`` (block numbers), ``dropped``."""
        return self._call("verify", digest=digest, timeout_s=3600)

    def record(self, digest: str, *, seconds: float) -> None:
        """Record accesses from now on for so long (a new recording replaces the last)."""
        self._call("record", digest=digest, seconds=seconds)

    def trace(self, digest: str) -> list[tuple[int, int, int]]:
        """What was recorded: milliseconds since the start, offset, length; in order of time."""
        return [(int(t), int(o), int(n)) for t, o, n in self._call("trace", digest=digest)["accesses"]]

    def stats(self) -> dict[str, Any]:
        """Counters and gauges as data; `blobs` has one row an attached blob."""
        return self._call("stats")

    def status(self) -> dict[str, Any]:
        """``mount``, ``mount_id``, pids, what the kernel can, and ``stale``: user -> digests held over a dead mount.

        A mount that stands on a dead one answers EIO: unmount it, `drop` its holds, attach and mount again.
        """
        return self._call("status")

    def stop(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """End the server and its mount; readers of what is not cached get EIO. Idempotent."""
        try:
            self._call("stop")
        except BlobdError as err:
            if err.code != "unavailable":
                raise
        deadline = time.monotonic() + timeout_s
        while self.is_running():
            if time.monotonic() > deadline:
                raise BlobdError("busy", f"the blob server of {self._places.root} does not end", "kill it")
            time.sleep(_POLL_S)

    def is_running(self) -> bool:
        """Whether a supervisor or worker lives (it holds the lock)."""
        try:
            fd = os.open(self._places.own / "lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return not try_lock(fd)
        finally:
            os.close(fd)

    def _call(self, verb: str, *, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        deadline = time.monotonic() + (timeout_s or self._timeout_s)
        for attempt in range(_TRIES):
            try:
                with socket.socket(socket.AF_UNIX) as link:
                    link.settimeout(max(0.1, deadline - time.monotonic()))
                    connect(link, self._places.socket)
                    send(link, {"verb": verb, **arguments})
                    reply = receive(link)
                break
            except (ConnectionError, EOFError, FileNotFoundError, TimeoutError) as err:
                # a worker that died under a call is replaced at once, and verbs may be repeated
                refused = isinstance(err, FileNotFoundError | ConnectionRefusedError)
                if refused or attempt + 1 == _TRIES or time.monotonic() > deadline:
                    raise BlobdError(
                        "unavailable", f"the blob server of {self._places.root} does not answer: {err}"
                    ) from err
                time.sleep(_POLL_S)
        if "error" in reply:
            error = reply["error"]
            raise BlobdError(error["code"], error["message"], error.get("hint", ""), error.get("field", ""))
        return reply


def connect(link: socket.socket, path: Path) -> None:
    """Connect by a short name: sun_path has 108 bytes, store roots may be longer (unix(7))."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        link.connect(f"/proc/self/fd/{fd}/{path.name}")
    finally:
        os.close(fd)


def ensure_server(
    root: Path, settings: Settings | None = None, *, argv: Sequence[str] = (), timeout_s: float = START_TIMEOUT_S
) -> BlobClient:
    """The client of the root's server; started, in a session of its own, when none runs.

    Args:
        root: the store root.
        settings: for a server that is started now; a running one keeps its own.
        argv: the program to start instead of ours (tests).
        timeout_s: until it answers.

    Raises:
        BlobdError: ``unavailable`` with the end of its log.
    """
    places = Places(root=root.resolve())
    places.make()
    client = BlobClient(places.root)
    log_path = places.own / "log"
    if not client.is_running():
        command = [*(argv or (sys.executable, "-m", "dsec_imagefs.blobd")), "--root", str(places.root)]
        command += ["--settings", (settings or Settings()).to_json()]
        with log_path.open("ab") as log:
            # The first process ends at once; the server is its child, in a session of its own.
            subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", check=False, timeout=timeout_s
            )
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            client.status()
            return client
        except BlobdError as err:
            if time.monotonic() > deadline:
                text = log_path.read_bytes()[-2000:].decode("utf-8", "replace") if log_path.exists() else ""
                raise BlobdError(
                    "unavailable", f"{err.message}; its log ends: {text.strip()}", "see dsec doctor"
                ) from err
            time.sleep(_POLL_S)
