"""Builds the machine's root as one initramfs and runs it. Needs QEMU, a C compiler, and a kernel.

DSEC_TEST_KERNEL names the kernel (a bzImage in boot/); its modules are taken from lib/modules beside that, if there.
`apt-get download` of a linux-image package and `dpkg-deb -x` give both without installing anything.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from nomad_dsec.guest.build import build

if TYPE_CHECKING:
    from collections.abc import Mapping

TREE = Path(__file__).parents[3]
PACKAGES = (
    "pytest pluggy iniconfig packaging pygments pytest-asyncio pytest-timeout msgspec typing-extensions pyroute2 "
    "zstandard"
).split()
SOURCES = (
    "nomad_dsec", "sdk/libdsec", "policies/dsec_policies", "imagefs/dsec_imagefs", "tests/kit", "tests/system/linux",
)  # fmt: skip
FILES = ("pyproject.toml", "tests/__init__.py", "tests/conftest.py", "tests/skips.txt", "tests/system/__init__.py")
TOOLS = ("sh", "mount", "umount", "losetup", "mkfs.ext4", "ldd", "nsenter", "unshare")
MODULES = ("quota_tree", "quota_v2", "loop", "overlay")
CALL_ROOT, INIT_BINARY = "/call-root.ext4", "/dsec-init"  # for lanes of calls, where a machine has been given them
LEFT_OUT = {"test", "idlelib", "tkinter", "ensurepip", "site-packages", "lib2to3", "pydoc_data", "__pycache__"}
KERNEL_ARGUMENTS = "console=ttyS0 quiet panic=-1 cgroup_no_v1=all mitigations=off rdinit=/init"


def kernel() -> Path | None:
    """The kernel to test on, if one was named."""
    named = os.environ.get("DSEC_TEST_KERNEL", "")
    return Path(named) if named and Path(named).is_file() else None


@dataclass(kw_only=True)
class Root:
    """A root file system to be: path inside -> file of the host, or its content."""

    files: dict[str, Path | bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)

    def add_tree(self, source: Path, target: str) -> None:
        """A directory, without what Python makes itself."""
        for directory, names, files in os.walk(source):
            names[:] = [name for name in names if name not in LEFT_OUT and not name.startswith("config-3")]
            inside = Path(target, Path(directory).relative_to(source))
            self.files |= {str(inside / name): Path(directory, name) for name in files}

    def add_program(self, source: Path, target: str | None = None) -> None:
        """A program or library, with the libraries that it is linked to."""
        self.files[target or str(source)] = source.resolve()
        linked = subprocess.run(["ldd", str(source)], capture_output=True, text=True, timeout=10, check=False)
        for library in re.findall(r"(/\S+) \(0x", linked.stdout):
            self.files[library] = Path(library).resolve()

    def write(self, out: BinaryIO) -> None:
        """As a cpio archive (initramfs-buffer-format.rst)."""
        made: set[str] = set()
        for path, content in self.files.items():
            for parent in reversed(Path(path).parents):
                name = str(parent).lstrip("/")
                if name and name not in made and f"/{name}" not in self.links:
                    made.add(name)
                    _entry(out, name, 0o40755, b"")
            data, mode = (
                (content, 0o755) if isinstance(content, bytes) else (content.read_bytes(), content.stat().st_mode)
            )
            _entry(out, path.lstrip("/"), 0o100000 | mode & 0o777, data)
        for path, text in self.links.items():
            _entry(out, path.lstrip("/"), 0o120777, text.encode())
        _entry(out, "TRAILER!!!", 0, b"")


_numbers = iter(range(1, 1 << 31))


def _entry(out: BinaryIO, name: str, mode: int, data: bytes) -> None:
    raw = name.encode() + b"\0"
    fields = (next(_numbers), mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(raw), 0)
    head = b"070701" + b"".join(b"%08x" % value for value in fields)
    out.write(head + raw + b"\0" * (-(len(head) + len(raw)) % 4) + data + b"\0" * (-len(data) % 4))


def build_root(scratch: Path, image: Path, command: list[str]) -> Root:
    """This Python, the packages that the tests import, our tree, the tools, and what to run."""
    init = scratch / "init"
    source = Path(__file__).with_name("init.c")
    subprocess.run(["cc", "-static", "-O2", "-o", str(init), str(source)], check=True, timeout=60, capture_output=True)
    root = Root(files={"/init": init})
    for name in ("proc", "sys", "dev", "tmp", "run", "etc", "mnt"):
        root.files[f"/{name}/.keep"] = b""
    root.files |= {"/etc/mtab": b"", "/etc/fstab": b""}
    root.links = {"/bin": "usr/bin", "/sbin": "usr/sbin"}
    python = _add_python(root)
    for name in PACKAGES:
        for file in importlib.metadata.distribution(name).files or ():
            located = Path(str(file.locate()))
            if ".." not in file.parts and located.suffix != ".pyc" and located.is_file():
                root.add_program(located, f"/packages/{file}") if located.suffix == ".so" else root.files.setdefault(
                    f"/packages/{file}", located
                )
    for tool in TOOLS:
        if found := shutil.which(tool):
            root.add_program(Path(found).resolve(), f"/usr/bin/{tool}")
    for source_name in SOURCES:
        root.add_tree(TREE / source_name, f"/tree/{source_name}")
    root.files |= {f"/tree/{name}": TREE / name for name in FILES}
    modules = _modules(image)
    root.files |= {f"/lib/modules/{path.name}": path for path in modules}
    root.files["/modules"] = b"".join(f"/lib/modules/{path.name}".encode() + b"\0" for path in modules)
    root.files["/command"] = b"".join(os.fsencode(word) + b"\0" for word in [str(python), *command])
    return root


def call_parts(scratch: Path) -> dict[str, Path | bytes]:
    """What lanes need of a machine: dsec-init, and an ext4 (which takes idmapped mounts) with Python and a shell."""
    inside = Root(links={"/bin": "usr/bin"})
    _add_python(inside)
    inside.add_program(Path(shutil.which("sh") or "/bin/sh").resolve(), "/usr/bin/sh")
    tree = scratch / "call-root"
    for name in ("proc", "sys", "dev", "tmp", "run", "etc", "var/tmp", "usr/bin"):
        (tree / name).mkdir(parents=True, exist_ok=True)
    (tree / "bin").symlink_to("usr/bin")
    for path, content in inside.files.items():
        target = tree / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content) if isinstance(content, bytes) else shutil.copy(content, target)
    python = tree / "usr/bin/python3"
    if not python.exists():
        python.symlink_to(Path(sys.executable).resolve())
    image = scratch / "call-root.ext4"
    subprocess.run(
        ["mkfs.ext4", "-q", "-O", "^has_journal", "-d", str(tree), str(image), "160M"],
        check=True, timeout=60, capture_output=True,
    )  # fmt: skip
    return {CALL_ROOT: image, INIT_BINARY: build(scratch / "bin")}


def _add_python(root: Root) -> Path:
    python = Path(sys.executable).resolve()
    root.add_program(python)
    stdlib = Path(sysconfig.get_path("stdlib"))
    root.add_tree(stdlib, str(stdlib))
    for extension in (stdlib / "lib-dynload").glob("*.so"):
        root.add_program(extension)
    return python


def _modules(image: Path) -> list[Path]:
    found = {path.stem: path for path in image.parents[1].glob("lib/modules/*/kernel/**/*.ko") if path.stem in MODULES}
    return [found[name] for name in MODULES if name in found]


def run_in_machine(
    scratch: Path, image: Path, command: list[str], *, timeout_s: float, also: Mapping[str, Path | bytes] | None = None
) -> str:
    """Run `python <command>` on that kernel; the console's text, whose last lines hold "exit status N".

    also: further files of its root, as `call_parts` makes.
    """
    archive = scratch / "initrd"
    root = build_root(scratch, image, command)
    root.files |= also or {}
    with archive.open("wb") as out:
        root.write(out)
    megahertz = re.search(r"cpu MHz\s*:\s*(\d+)", Path("/proc/cpuinfo").read_text())
    early = f" tsc_early_khz={int(megahertz[1]) * 1000}" if megahertz else ""
    argv = "qemu-system-x86_64 -M q35 -accel tcg,thread=multi -m 2048 -smp 1".split()
    argv += ["-kernel", str(image), "-initrd", str(archive), "-append", KERNEL_ARGUMENTS + early]
    argv += "-nodefaults -no-user-config -nographic -serial stdio -no-reboot".split()
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False)
    return done.stdout.decode(errors="replace") + done.stderr.decode(errors="replace")
