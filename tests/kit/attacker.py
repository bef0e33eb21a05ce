"""The attacker's program (tests/attack/payload, C) built with the host's compiler, its answers, and bare runs of it.

A *twin* is the same attack without the policy: as the host's root in namespaces of its own, which is what "root in a
naive container" can do.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "attack" / "payload"
#: Mounts, pids, host name, IPC and network of its own; but the host's root, its capabilities, and no filter.
NAIVE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc", "--net", "--mount-proc")
COMPILE = ("cc", "-std=gnu11", "-O1", "-static", "-Wall", "-Wextra", "-Werror")
FILTER_THEN_EXEC = """
import ctypes, os, struct, sys
program = sys.stdin.buffer.read()
libc = ctypes.CDLL(None, use_errno=True)
code = ctypes.create_string_buffer(program, len(program))
header = ctypes.create_string_buffer(struct.pack("<H6xQ", len(program) // 8, ctypes.addressof(code)), 16)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, header) == 0, ctypes.get_errno()
os.execv(sys.argv[1], sys.argv[1:])
"""


def build_attacker(directory: Path) -> Path:
    """Compile the payload into `directory`, once for a given source."""
    sources = sorted(SOURCES.glob("*.c"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (*sources, SOURCES / "attack.h"))).hexdigest()
    binary = directory / f"attack-{digest[:16]}"
    if not binary.exists():
        made = binary.with_suffix(f".{os.getpid()}")
        argv = [
            "cc",
            "-std=gnu11",
            "-O1",
            "-static",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-o",
            str(made),
            *map(str, sources),
        ]
        subprocess.run(argv, check=True, timeout=120)
        made.rename(binary)
    return binary


def answers(output: bytes) -> dict[str, int]:
    """The lines "key value" of one run."""
    rows = (line.rsplit(" ", 1) for line in output.decode().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2}


def run_bare(binary: Path, *argv: str | int, timeout_s: float = 30.0) -> dict[str, int]:
    """The attack as it is, in the test's own place: root of the host."""
    return _run([str(binary), *map(str, argv)], None, timeout_s)


def run_naive(binary: Path, *argv: str | int, timeout_s: float = 30.0) -> dict[str, int]:
    """The attack by root in fresh namespaces, without any policy."""
    return _run([*NAIVE, str(binary), *map(str, argv)], None, timeout_s)


def run_filtered(program: bytes, binary: Path, *argv: str | int, timeout_s: float = 30.0) -> dict[str, int]:
    """The attack by the host's root under a system call filter and nothing else: what the filter alone denies."""
    return _run([sys.executable, "-S", "-c", FILTER_THEN_EXEC, str(binary), *map(str, argv)], program, timeout_s)


def _run(argv: list[str], stdin: bytes | None, timeout_s: float) -> dict[str, int]:
    done = subprocess.run(argv, input=stdin or b"", capture_output=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"{argv[-3:]}: {done.returncode} {done.stderr.decode(errors='replace')[-500:]}"
    return answers(done.stdout)
