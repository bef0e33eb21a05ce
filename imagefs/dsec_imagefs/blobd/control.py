"""The worker's end of the control socket: root only, bounded connections, bounded messages, one verb each."""

from __future__ import annotations

import logging
import os
import socket
import threading
from struct import Struct
from typing import TYPE_CHECKING, Any

from dsec_imagefs.blobd.framing import BadMessage, receive, send
from dsec_imagefs.errors import ImageError

if TYPE_CHECKING:
    from pathlib import Path

    from dsec_imagefs.blobd.metrics import Counters
    from dsec_imagefs.blobd.verbs import Verbs

log = logging.getLogger("dsec.blobd")
BACKLOG = 128
CONNECTIONS = 32
_MESSAGE_TIMEOUT_S = 30.0
_UCRED = Struct("=iII")  # pid, uid, gid: SO_PEERCRED, unix(7)


def listen(path: Path) -> socket.socket:
    """The socket, for the owner only; the supervisor keeps it, so callers wait while a worker is replaced."""
    path.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX)
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        made.bind(f"/proc/self/fd/{fd}/{path.name}")
        path.chmod(0o600)
    finally:
        os.close(fd)
    made.listen(BACKLOG)
    return made


class Control:
    """Accepts and serves, a thread a connection."""

    def __init__(self, listener: socket.socket, verbs: Verbs, counters: Counters) -> None:
        self._listener = listener
        self._verbs = verbs
        self._counters = counters
        self._slots = threading.BoundedSemaphore(CONNECTIONS)

    def start(self) -> None:
        """Accept in a thread."""
        threading.Thread(target=self._accept, name="control", daemon=True).start()

    def _accept(self) -> None:
        while True:
            self._slots.acquire()  # the rest wait in the backlog
            try:
                link, _ = self._listener.accept()
            except OSError:
                log.exception("step=accept")
                return
            threading.Thread(target=self._serve, args=(link,), name="call", daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        try:
            with link:
                link.settimeout(_MESSAGE_TIMEOUT_S)
                _, uid, _ = _UCRED.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
                if uid not in (0, os.geteuid()):
                    raise ImageError("denied", f"uid {uid} may not control the blob server", "be root")
                send(link, self._reply(link))
        except (OSError, EOFError):
            return  # the caller left
        except ImageError:
            self._counters.bad_messages += 1
        finally:
            self._slots.release()

    def _reply(self, link: socket.socket) -> dict[str, Any]:
        try:
            return self._verbs.call(receive(link))
        except BadMessage as err:
            self._counters.bad_messages += 1
            return _error(ImageError("bad_source", str(err)))
        except ImageError as err:
            return _error(err)
        except Exception as err:  # a verb's bug must not end the connection without a word
            log.exception("step=verb")
            return _error(ImageError("internal", f"{type(err).__name__}: {err}", "see the blob server's log"))


def _error(err: ImageError) -> dict[str, Any]:
    return {"error": {"code": err.code, "message": err.message, "hint": err.hint, "field": err.field}}
