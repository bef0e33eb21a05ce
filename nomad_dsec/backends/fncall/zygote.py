"""The zygote: run by an interpreter of the image (CPython >= 3.8), once a lane; it forks a child for each call.

Only its text is used here (lane.py passes it with -c). It imports nothing of ours; what it imports is what calls find
loaded. Its one socket (descriptor 3) goes to the lane's PID 1; the messages are those of guest/c/call.h.

Each page that a child writes to is copied first, and a reference count is a write: a call costs what it touches. So
`threading` and `random` are left out: their work after each fork copies 130 pages, half of what a small program does.
What a child does in Python is rehearsed before, so often that the interpreter has adapted its code to it: code that
adapts is written to. The environment is empty before the fork, as taking it apart in each child would copy 70 pages.
"""

from __future__ import annotations

import atexit
import bisect  # noqa: F401
import collections  # noqa: F401
import ctypes
import datetime  # noqa: F401
import decimal  # noqa: F401
import functools  # noqa: F401
import gc
import heapq  # noqa: F401
import io  # noqa: F401
import itertools  # noqa: F401
import json  # noqa: F401
import math  # noqa: F401
import mmap
import operator  # noqa: F401
import os
import re  # noqa: F401
import resource
import signal
import socket
import string  # noqa: F401
import struct
import sys
import traceback
import types
import typing

HEADER = struct.Struct("<IIQQQQQQQQQ6I")
REPORT = struct.Struct("<IIIIQ")
NEWNS_NEWIPC_NEWUTS = 0x00020000 | 0x08000000 | 0x04000000
NEWPID = 0x20000000
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 24, 38
NOBODY = 65534
WORK = "/tmp/work"
STEP_FORK, STEP_ENTER, STEP_LIMITS, STEP_USER = 3, 4, 5, 6
WORDS_FIRST, WORDS_MOST = 4096, 1 << 20  # small ones are the rule, and a large buffer is new pages for each child
REHEARSALS = 32
MOST_FAULTS = (1 << 32) - 1
FDS = struct.Struct("5i")  # pidfd of the namespaces, stdin, stdout, stderr, words

Header = typing.Tuple[int, ...]  # noqa: UP006 - read by Python 3.8 too

libc = ctypes.CDLL(None, use_errno=True)
page = mmap.mmap(-1, 4096)  # shared with the child: how far it came before the program began


def checked(result: int) -> None:
    """Raise what a C call left in errno."""
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def limit(kind: int, soft: int, hard: int) -> None:
    """Set a limit, as far as the hard one in force lets us."""
    now_hard = resource.getrlimit(kind)[1]
    if now_hard != resource.RLIM_INFINITY:
        hard = min(hard, now_hard)
    resource.setrlimit(kind, (min(soft, hard), hard))


def become(header: Header, fds: Header) -> None:
    """Enter the call's namespaces and give up every right; mirrors call_child.c."""
    pidfd, stdin, stdout, stderr, _ = fds
    page[0] = STEP_ENTER
    checked(libc.setns(pidfd, NEWNS_NEWIPC_NEWUTS))
    os.setsid()
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.closerange(3, 4096)
    killable = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    os.write(killable, b"0")
    os.close(killable)
    os.umask(0o022)
    os.chdir(WORK)
    page[0] = STEP_LIMITS
    cpu_us, disk_bytes, stack_bytes, nofile = header[4], header[6], header[7], header[12]
    cpu_s = (cpu_us + 999999) // 1000000 + 1
    limit(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)
    limit(resource.RLIMIT_FSIZE, disk_bytes, disk_bytes)
    limit(resource.RLIMIT_STACK, stack_bytes, stack_bytes)
    limit(resource.RLIMIT_NOFILE, nofile, nofile)
    limit(resource.RLIMIT_CORE, 0, 0)
    page[0] = STEP_USER
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    checked(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0))  # as after an execve: its own /proc/self is its own
    page[0] = 0
    page.close()  # the program must not be able to say that it never began


def read_words(fd: int) -> list[bytes]:
    """Argv and env. Only the child ever has them: the zygote's own memory is in all later children."""
    parts: list[bytes] = []
    size = WORDS_FIRST
    while True:
        part = os.read(fd, size)
        if not part:
            return b"".join(parts).split(b"\0")
        parts.append(part)
        size = min(2 * size, WORDS_MOST)


def call(header: Header, fds: Header) -> int:
    """In the child: the program as __main__; the exit status."""
    try:
        words = read_words(fds[4])
        become(header, fds)
    except OSError as error:
        page[1] = min(error.errno or 5, 255)
        os._exit(127)
    argc, envc = header[13], header[14]
    set_environment(words[argc : argc + envc])
    names = become_main(words[:argc])
    gc.enable()
    return run(names)


def set_environment(words: list[bytes]) -> None:
    """NAME=value words as the environment, which is empty."""
    for word in words:
        name, _, value = word.partition(b"=")
        os.environb[name] = value


def become_main(words: list[bytes]) -> dict[str, typing.Any]:
    """argv, the path of modules, and a new __main__ whose names are returned."""
    sys.argv[:] = [os.fsdecode(word) for word in words]
    sys.path.insert(0, WORK)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=f"{WORK}/{sys.argv[0]}", __builtins__=__builtins__)
    sys.modules["__main__"] = module
    return module.__dict__


def read_source(path: str) -> bytes:
    """The program's text."""
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def execute(source: bytes, names: dict[str, typing.Any]) -> None:
    """Compile and run it."""
    exec(compile(source, names["__file__"], "exec"), names)  # noqa: S102 - it is what this is for


def run(names: dict[str, typing.Any]) -> int:
    """What python3 FILE does, but for the interpreter's own dismantling (clean=True has that)."""
    status = 0
    try:
        execute(read_source(names["__file__"]), names)
    except SystemExit as end:
        status = exit_status(end.code)
    except KeyboardInterrupt as error:
        show(error)
        flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:  # noqa: BLE001 - the program's own, shown as the interpreter shows it
        status = 1
        show(error)
    try:
        threading = sys.modules.get("threading")
        if threading is not None:
            threading._shutdown()
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - as above
        sys.excepthook(*sys.exc_info())
    return status if flush() else 120


def show(error: BaseException) -> None:
    """A traceback without our own two frames."""
    frames = error.__traceback__
    for _ in range(2):
        frames = frames.tb_next if frames else None
    sys.excepthook(type(error), error.with_traceback(frames), frames)


def exit_status(code: object) -> int:
    """As the interpreter turns SystemExit's argument into a status."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def flush() -> bool:
    """Write out what the program printed."""
    good = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError):
            good = False
    return good


def start(header: Header, fds: Header, sock: socket.socket) -> int:
    """Fork into the call's pid namespace; the child's pid, or -1 with a report sent."""
    try:
        checked(libc.setns(fds[0], NEWPID))
        child = os.fork()
    except OSError as error:
        sock.send(REPORT.pack(0, STEP_FORK, error.errno or 5, 0, 0))
        return -1
    if child == 0:
        status = 1
        try:
            sock.close()
            status = call(header, fds)
        finally:
            os._exit(status)
    return child


def serve(sock: socket.socket) -> None:
    """One call at a time: start it, wait, report."""
    while True:
        message, rights, _, _ = sock.recvmsg(HEADER.size, socket.CMSG_SPACE(FDS.size))
        if not message:
            os._exit(0)
        fds = FDS.unpack(rights[0][2][: FDS.size])
        page[0:2] = b"\0\0"
        child = start(HEADER.unpack(message), fds, sock)
        for fd in fds:
            os.close(fd)
        if child > 0:
            _, status, use = os.wait4(child, 0)
            sock.send(
                REPORT.pack(status, page[0] if status else 0, page[1], min(use.ru_majflt, MOST_FAULTS), use.ru_maxrss)
            )


def rehearse() -> None:
    """What a child does, over and over; descriptors 1 and 2 are /dev/null here. Nothing of it stays."""
    before = sys.argv[:], sys.path[:], sys.modules["__main__"]
    for _ in range(REHEARSALS):
        reading, writing = os.pipe()
        os.write(writing, b"main.py\0A=b\0C=d\0E=f\0")
        os.close(writing)
        words = read_words(reading)
        os.close(reading)
        set_environment(words[1:4])
        os.environ.clear()
        names = become_main(words[:1])
        read_source(os.devnull)
        execute(b"import sys\nfor n in range(2):\n    print(n, str(n), 1.5, file=sys.stderr)\nprint(1)\n", names)
        flush()
        core = resource.getrlimit(resource.RLIMIT_CORE)
        limit(resource.RLIMIT_CORE, core[0], core[1])
        checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    sys.argv[:], sys.path[:], sys.modules["__main__"] = before
    "".join(traceback.format_exception_only(ValueError, ValueError("x")))
    "\xe9".encode().decode("latin-1")


def main() -> None:
    """Until the lane's PID 1 closes its end."""
    sys.path[:] = [entry for entry in sys.path if entry]
    os.environ.clear()
    checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))  # for all children: it can't be taken back
    rehearse()
    for cap in range(64):  # what an execve could give back; what we hold now is not touched
        if libc.prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) != 0:
            break
    sock = socket.socket(fileno=3)
    gc.collect()
    gc.freeze()
    gc.disable()
    sock.send(b"R")
    serve(sock)


if __name__ == "__main__":
    main()
