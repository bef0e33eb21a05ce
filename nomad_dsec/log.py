"""JSON log lines on stderr: a sentence and ids. `log.info("sandbox is ready", sandbox=id, took_ms=12)`."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, TextIO

_RESERVED = ("ts", "level", "log", "msg")


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": round(record.created, 3),
            "level": record.levelname.lower(),
            "log": record.name,
            "msg": record.getMessage(),
        }
        line.update(getattr(record, "ids", {}))
        if record.exc_info:
            line["exc"] = self.formatException(record.exc_info)
        return json.dumps(line, default=repr)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        ids = " ".join(f"{key}={value}" for key, value in getattr(record, "ids", {}).items())
        when = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"{when} {record.levelname.lower():7} {record.getMessage()} {ids}".rstrip()
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class Log:
    """A named logger whose keyword arguments become fields."""

    __slots__ = ("_logger",)

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, message: str, **ids: Any) -> None:
        """For one who is looking for a fault."""
        self._log(logging.DEBUG, message, ids)

    def info(self, message: str, **ids: Any) -> None:
        """What an operator wants to find later."""
        self._log(logging.INFO, message, ids)

    def warning(self, message: str, **ids: Any) -> None:
        """Something to look at; nothing is lost."""
        self._log(logging.WARNING, message, ids)

    def error(self, message: str, **ids: Any) -> None:
        """Something failed."""
        self._log(logging.ERROR, message, ids)

    def exception(self, message: str, **ids: Any) -> None:
        """Something failed that we did not foresee: with the traceback."""
        self._log(logging.ERROR, message, ids, exc_info=True)

    def _log(self, level: int, message: str, ids: dict[str, Any], *, exc_info: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            fields = {(f"{key}_" if key in _RESERVED else key): value for key, value in ids.items()}
            self._logger.log(level, "%s", message, extra={"ids": fields}, exc_info=exc_info)


def get_log(name: str) -> Log:
    """The logger of a room."""
    return Log(name)


def setup_logging(*, level: str = "info", json_lines: bool = True, stream: TextIO | None = None) -> None:
    """Send all logs to the stream (stderr). Called once by a process's main."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter() if json_lines else _TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
