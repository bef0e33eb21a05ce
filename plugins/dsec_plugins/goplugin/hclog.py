"""Log lines as a go-plugin host reads them from fd 2: one JSON object a line.

The host asserts that @message, @level and @timestamp are JSON strings and dies when they are not, so they are forced to
be. After a host's crash fd 2 is a pipe without a reader: a failed write must never reach the caller.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

_LEVELS = ((logging.ERROR, "error"), (logging.WARNING, "warn"), (logging.INFO, "info"), (logging.DEBUG, "debug"))
_LINE_BYTES = 60_000  # the host cuts lines at 64 KiB and then no longer sees JSON
log = logging.getLogger("goplugin")
_RESERVED = frozenset({"@message", "@level", "@timestamp", "@module"})


def render(level: str, message: object, module: str, when_s: float, fields: dict[str, Any] | None = None) -> bytes:
    """One line, newline included, at most 60,000 bytes. when_s: seconds since the epoch."""
    whole, part = divmod(int(when_s * 1_000_000), 1_000_000)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{part:06d}Z"
    record = {"@level": str(level), "@message": str(message), "@module": str(module), "@timestamp": stamp}
    for key, value in (fields or {}).items():
        record[f"_{key}" if key in _RESERVED else str(key)] = str(value)
    line = json.dumps(record).encode("ascii")
    if len(line) > _LINE_BYTES:
        record = {key: record[key] for key in _RESERVED}
        record["@message"] = record["@message"][: _LINE_BYTES // 12] + " [cut]"  # \\uXXXX twice a character at worst
        line = json.dumps(record).encode("ascii")
    return line + b"\n"


class HclogHandler(logging.Handler):
    """Writes records to a descriptor, and never raises."""

    def __init__(self, fd: int = 2) -> None:
        super().__init__()
        self._fd = fd

    def emit(self, record: logging.LogRecord) -> None:
        """One write(2) a line, so that lines of several threads do not mix."""
        try:
            level = next((name for number, name in _LEVELS if record.levelno >= number), "trace")
            text = record.getMessage()
            if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
                level = "debug"  # grpc calls it an error that a stream is still open when its server ends
            elif record.exc_info:
                text += "\n" + "".join(traceback.format_exception(*record.exc_info))
            line = render(level, text, record.name, record.created, getattr(record, "ids", None))
            while line:
                line = line[os.write(self._fd, line) :]
        except Exception:  # noqa: BLE001, S110 - a plugin must not die because nobody reads its log
            pass


def install(level: int = logging.INFO) -> None:
    """Send all logging, and every uncaught exception of any thread or task, to fd 2 as JSON."""
    root = logging.getLogger()
    root.handlers[:] = [HclogHandler()]
    root.setLevel(level)

    def uncaught(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        log.error("uncaught exception", exc_info=(kind, error, where))

    sys.excepthook = uncaught
    threading.excepthook = lambda args: log.error(
        "uncaught exception in a thread",
        exc_info=(args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback),
    )


def watch_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Log what no task handled."""

    def handler(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        logging.getLogger("goplugin").error(
            context.get("message", "event loop error"), exc_info=context.get("exception")
        )

    loop.set_exception_handler(handler)
