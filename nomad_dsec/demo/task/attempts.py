"""Runs inside a sandbox: tries what must not work and prints a JSON list of [what, outcome]. Harmless if allowed."""

import ctypes
import errno
import json
import os
import signal
import socket
import time

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def syscall(number, *arguments):
    """A raw system call; raises OSError."""
    if libc.syscall(ctypes.c_long(number), *arguments) == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def read(path):
    """Read a little of a file; an empty one (a mask) counts as denied."""
    with open(path, "rb") as file:
        if not file.read(4096):
            raise OSError(errno.ENODATA, "masked: empty")


def write(path):
    """Open a file for writing, without writing."""
    os.close(os.open(path, os.O_WRONLY))


def connect(address, port):
    """A TCP connection with a short deadline."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        probe.connect((address, port))


class NoEffect(Exception):
    """The kernel said yes and did nothing."""


def kill_init():
    """SIGKILL to PID 1, which the kernel takes and drops; if it did not, nobody would read this."""
    os.kill(1, signal.SIGKILL)
    time.sleep(0.1)
    os.kill(1, 0)
    raise NoEffect


def trace_child():
    """What gdb does: attach to a child of one's own."""
    child = os.fork()
    if child == 0:
        time.sleep(10)
        os._exit(0)
    try:
        syscall(101, 16, child, None, None)
        os.waitpid(child, 0)
        syscall(101, 17, child, None, None)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def fork_bomb():
    """Fork until refused, then end the children."""
    children = []
    try:
        for _ in range(5000):
            child = os.fork()
            if child == 0:
                time.sleep(30)
                os._exit(0)
            children.append(child)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)


def fill_disk():
    """Write until refused."""
    try:
        with open("/var/tmp/fill", "wb") as out:
            out.writelines(b"\0" * (1 << 20) for _ in range(100_000))
    finally:
        if os.path.exists("/var/tmp/fill"):
            os.unlink("/var/tmp/fill")


ATTEMPTS = [
    ("mount a tmpfs", lambda: syscall(165, b"none", b"/mnt", b"tmpfs", 0, None)),
    ("a user namespace of its own", lambda: syscall(272, 0x10000000)),
    ("join the namespaces of PID 1", lambda: syscall(308, os.open("/proc/1/ns/mnt", os.O_RDONLY), 0)),
    ("trace PID 1", lambda: syscall(101, 16, 1, None, None)),
    ("kill PID 1", kill_init),
    ("read memory of PID 1", lambda: read("/proc/1/mem")),
    ("read /proc/kcore", lambda: read("/proc/kcore")),
    ("read /proc/kpagecount", lambda: read("/proc/kpagecount")),
    ("read the kernel's log", lambda: syscall(103, 3, ctypes.create_string_buffer(64), 64)),
    ("write /proc/sys/kernel/core_pattern", lambda: write("/proc/sys/kernel/core_pattern")),
    ("write /proc/sysrq-trigger", lambda: write("/proc/sysrq-trigger")),
    ("make a device node", lambda: os.mknod("/tmp/sda", 0o60600, os.makedev(8, 0))),
    ("load a BPF program", lambda: syscall(321, 5, None, 0)),
    ("open a perf counter", lambda: syscall(298, None, 0, -1, -1, 0)),
    ("io_uring", lambda: syscall(425, 1, None)),
    ("a kernel keyring", lambda: syscall(250, 0, -3, 1)),
    ("set the clock", lambda: time.clock_settime(time.CLOCK_REALTIME, time.time())),
    ("a raw network socket", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close()),
    ("connect to the host", lambda: connect("169.254.169.254", 80)),
    ("connect to the internet", lambda: connect("192.0.2.1", 443)),
    ("trace its own child, as gdb does", trace_child),
    ("fork without end", fork_bomb),
    ("fill the disk", fill_disk),
]


def outcome(attempt):
    """What became of it."""
    try:
        attempt()
    except NoEffect:
        return "no effect"
    except OSError as error:
        return errno.errorcode.get(error.errno, type(error).__name__) if error.errno else type(error).__name__
    return "allowed"


print(json.dumps([[name, outcome(attempt)] for name, attempt in ATTEMPTS]))
