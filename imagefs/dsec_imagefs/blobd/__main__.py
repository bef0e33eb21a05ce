"""`python -m dsec_imagefs.blobd --root DIR [--settings JSON]`: start a blob server in the background.

Exit codes: 0 it was started (see `<root>/blobd/log`), 1 it runs already, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dsec_imagefs.blobd.settings import Places, Settings
from dsec_imagefs.blobd.source import open_store
from dsec_imagefs.blobd.supervisor import Adopted, Supervisor
from dsec_imagefs.durable import try_lock
from dsec_imagefs.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsec_imagefs.blobd.source import OpenStore

_LOCK_TRIES, _LOCK_PAUSE_S = 10, 0.02
OOM_SCORE_ADJ = -900  # the server dies last: with it every sandbox of its images would


def main(argv: Sequence[str] | None = None, *, opener: OpenStore = open_store, program: Sequence[str] = ()) -> int:
    """Start, or go on after an exec.

    Args:
        argv: the arguments; None is the command line.
        opener: how stores are opened.
        program: the command line of this program without arguments.
    """
    parser = argparse.ArgumentParser(prog="python -m dsec_imagefs.blobd")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--settings", default="{}")
    parser.add_argument("--adopt", default="", help=argparse.SUPPRESS)
    parser.add_argument("--foreground", action="store_true")
    args = parser.parse_args(argv)
    try:
        settings = Settings.from_json(args.settings)
        adopted = Adopted.parse(args.adopt) if args.adopt else None
    except (ImageError, ValueError, TypeError) as err:
        parser.error(str(err))
    places = Places(root=args.root.resolve())
    places.make()
    lock_fd = adopted.lock_fd if adopted else os.open(places.own / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not _take(lock_fd):
        sys.stderr.write(f"a blob server of {places.root} runs already\n")
        return 1
    if not adopted and not args.foreground and os.fork():
        return 0
    _settle()
    again = [*(program or (sys.executable, "-m", "dsec_imagefs.blobd")), "--root", str(places.root)]
    again += ["--settings", settings.to_json(), "--foreground"]
    supervisor = Supervisor(places, settings, lock_fd, argv=again, opener=opener)
    try:
        supervisor.begin(adopted)
    except ImageError as err:
        logging.getLogger("dsec.blobd").error("can't start: %s", err)
        return 1
    supervisor.run(adopted=adopted is not None)
    return 0


def _take(lock_fd: int) -> bool:
    """Take the lock; who only looks whether a server runs has it for an instant."""
    for _ in range(_LOCK_TRIES):
        if try_lock(lock_fd):
            return True
        time.sleep(_LOCK_PAUSE_S)
    return False


def _settle() -> None:
    """A session of our own; last to be killed for memory; a log with times."""
    with suppress(PermissionError):  # a session's leader already
        os.setsid()
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE_ADJ))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(message)s")
    os.umask(0o077)


if __name__ == "__main__":
    sys.exit(main())
