"""Compiles dsec-init from c/*.c with the system's compiler; cached by a hash of everything that goes in."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "c"
NAME = "dsec-init"
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-fno-common")
RELEASE = (
    "-O2", "-static", "-s", "-ffunction-sections", "-fdata-sections", "-Wl,--gc-sections", "-fstack-protector-strong",
)  # fmt: skip
SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
COMPILE_TIMEOUT_S = 300.0


def sources() -> list[Path]:
    """The C files of the program; fuzz targets and other programs of their own are not among them."""
    return sorted(p for p in SOURCES.glob("*.c") if not p.name.startswith("fuzz_"))


def compiler() -> str:
    """Path of the C compiler: $CC, cc or gcc. RuntimeError when there is none."""
    found = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if found is None:
        raise RuntimeError("no C compiler: install gcc and libc6-dev, or set CC")
    return found


def compile_program(output: Path, files: list[Path], flags: tuple[str, ...]) -> Path:
    """Compile and link `files` into `output`, unless it stands there already, made of the same input.

    RuntimeError carries the command and the compiler's words.
    """
    digest = hashlib.sha256()
    for path in sorted({*files, *SOURCES.glob("*.h")}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update("\0".join((compiler(), *flags)).encode())
    stamp = output.with_name(output.name + ".sha256")
    if output.exists() and stamp.exists() and stamp.read_text() == digest.hexdigest():
        return output
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".build-") as scratch:
        made = Path(scratch) / output.name
        argv = [compiler(), *FLAGS, *flags, "-o", str(made), *map(str, files)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"compiling dsec-init failed\n{' '.join(argv)}\n{done.stderr[-8000:]}")
        made.replace(output)  # a running dsec-init keeps its old inode
    stamp.write_text(digest.hexdigest())
    return output


def build(output_dir: Path, *, sanitize: bool = False) -> Path:
    """Build dsec-init into `output_dir` and return its path. sanitize: with ASan and UBSan, for tests, not static."""
    has_launch = any(p.name.startswith("launch") for p in sources())
    flags = (SANITIZED if sanitize else RELEASE) + (() if has_launch else ("-DNO_LAUNCH",))
    return compile_program(Path(output_dir) / NAME, sources(), flags)


if __name__ == "__main__":
    build(Path(__file__).resolve().parent / "bin")
