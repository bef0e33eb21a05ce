"""A small root made of the host's own bash and the attacker's program, laid out as merged-/usr distributions are.

Big enough for shells, links and set-uid files to be real; small enough to be made anew in a second on any machine.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

#: Programs of the host that every Linux has and that tests run inside.
PROGRAMS = ("bash", "cat", "ls", "mv", "rm", "mkdir", "cp", "ln", "chmod", "stat", "sleep", "dd", "id", "head", "env")
DEBUGGERS = ("strace", "gdb")
PASSWD = "root:x:0:0:root:/root:/bin/bash\nagent:x:1000:1000::/home/agent:/bin/bash\nnobody:x:65534:65534::/:/bin/sh\n"
GROUP = "root:x:0:\ntty:x:5:\nagent:x:1000:\nnogroup:x:65534:\n"


def make_tree(root: Path, attacker: Path) -> Path:
    """Fill `root` and return it: /usr/bin/attack, a set-uid copy of it, bash and friends with their libraries."""
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    for name in ("etc", "root", "home/agent", "proc", "sys", "dev", "run", "var/tmp", "tmp", "work", "mnt", "opt/tool"):
        (root / name).mkdir(parents=True)
    for name in ("tmp", "var/tmp", "work"):
        (root / name).chmod(0o1777)
    (root / "etc/passwd").write_text(PASSWD)
    (root / "etc/group").write_text(GROUP)
    for program in PROGRAMS:
        _copy_program(root, program)
    # A file of its own: a shell that attacks bash must not be bash, or ETXTBSY alone would protect it.
    shutil.copy(root / "usr/bin/bash", root / "usr/bin/sh")
    (root / "opt/tool/run").symlink_to("/usr/bin/bash")
    shutil.copy(attacker, root / "usr/bin/attack")
    shutil.copy(attacker, root / "usr/bin/attack-setuid")
    (root / "usr/bin/attack-setuid").chmod(0o4755)
    return root


def add_debuggers(root: Path) -> Path:
    """Add those of strace and gdb that the host has; gdb brings the Python library that it can't start without."""
    for program in DEBUGGERS:
        if shutil.which(program, path="/usr/bin:/bin"):
            _copy_program(root, program)
    unwanted = shutil.ignore_patterns("__pycache__", "test", "dist-packages", "config-*", "idlelib", "*.so")
    for library in Path("/usr/lib").glob("python3.*"):
        shutil.copytree(library, root / library.relative_to("/"), ignore=unwanted, symlinks=True)
    return root


def _copy_program(root: Path, program: str) -> None:
    found = shutil.which(program, path="/usr/bin:/bin")
    assert found, f"{program} is not on this machine"
    shutil.copy(Path(found).resolve(), root / "usr/bin" / program)
    linked = subprocess.run(["ldd", found], capture_output=True, text=True, check=True, timeout=10).stdout
    for library in re.findall(r"(/\S+) \(0x", linked):
        # Below /usr in the image, whichever of the two names the host's loader uses.
        target = root / library.lstrip("/").removeprefix("usr/")
        target = root / "usr" / target.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy(library, target)
