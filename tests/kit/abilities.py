"""What this machine can do, found by trying. `@needs("root", "erofs")` skips a test with the reason when it can't."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.kit.peerclients import peers_home
from tests.kit.vm.machine import CALL_ROOT, kernel

if TYPE_CHECKING:
    from collections.abc import Callable

ABILITIES: dict[str, Callable[[], str]] = {}

# A kernel that is wedged hangs in these for ever (state D), so the parent must not wait for the child.
_FILTER_PROGRAM = """
import ctypes, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
class Prog(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
allow = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000))
libc.prctl(38, 1, 0, 0, 0)
prog = Prog(1, ctypes.cast(allow, ctypes.c_void_p))
sys.exit(0 if libc.prctl(22, 2, ctypes.byref(prog)) == 0 else ctypes.get_errno())
"""


def ability(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Register a probe: it returns "" or why the ability is missing."""

    def register(probe: Callable[[], str]) -> Callable[[], str]:
        ABILITIES[name] = functools.cache(probe)
        return ABILITIES[name]

    return register


def missing(name: str) -> str:
    """ "" or the reason."""
    return ABILITIES[name]()


def needs(*names: str) -> pytest.MarkDecorator:
    """Mark a test (or a module, by pytestmark) as needing these abilities."""
    unknown = [name for name in names if name not in ABILITIES]
    assert not unknown, f"no probe for {unknown}: add one to tests/kit/abilities.py"
    return pytest.mark.needs(*names)


def _has_tool(tool: str) -> str:
    return "" if shutil.which(tool) else f"{tool} is not on PATH"


for _tool in (
    "crun",
    "runc",
    "runsc",
    "skopeo",
    "debootstrap",
    "nft",
    "ip",
    "cc",
    "clang",
    "nomad",
    "consul",
    "openssl",
    "gdb",
    "docker-registry",
):
    ability(_tool)(functools.partial(_has_tool, _tool))
for _tool in ("fsck.erofs", "dump.erofs", "mkfs.erofs", "mkfs.btrfs", "mkfs.xfs", "qemu-system-x86_64"):
    ability(_tool)(functools.partial(_has_tool, _tool))
for _tool in ("terraform", "strace"):
    ability(_tool)(functools.partial(_has_tool, _tool))


@ability("go")
def _go() -> str:
    if not shutil.which("go"):
        return "go is not on PATH"
    module = Path(__file__).parent / "gohost"
    done = subprocess.run(
        ["go", "mod", "download"], cwd=module, capture_output=True, text=True, check=False, timeout=300
    )
    return "" if done.returncode == 0 else f"go can't get the modules of tests/kit/gohost: {done.stderr[-200:].strip()}"


@ability("vault")
def _vault() -> str:
    from tests.kit.vault import vault_program

    if not vault_program():
        return "neither vault nor bao is on PATH"
    return _has_tool("openssl")


@ability("nomad-exec")
def _nomad_exec() -> str:
    if not shutil.which("nomad"):
        return "nomad is not on PATH"
    line = subprocess.run(["nomad", "version"], capture_output=True, text=True, check=False, timeout=30).stdout
    old = line.startswith("Nomad v1.") and int(line.split(".")[1]) < 7
    return "agents of 1.6 panic when `nomad alloc exec` hangs up first (two writers to one WebSocket)" if old else ""


@ability("x86_64")
def _x86_64() -> str:
    return "" if platform.machine() == "x86_64" else f"this is {platform.machine()}"


@ability("root")
def _root() -> str:
    return "" if os.geteuid() == 0 else "not root"


@ability("filters")
def _filters() -> str:
    child = subprocess.Popen([sys.executable, "-c", _FILTER_PROGRAM], start_new_session=True)
    try:
        code = child.wait(timeout=15)
    except subprocess.TimeoutExpired:
        return "the kernel hangs on loading a seccomp filter (it needs a restart)"
    return "" if code == 0 else f"seccomp filters are refused: {os.strerror(code)}"


@ability("erofs")
def _erofs() -> str:
    return "" if "erofs" in Path("/proc/filesystems").read_text() else "the kernel has no erofs"


@ability("overlay")
def _overlay() -> str:
    return "" if "overlay" in Path("/proc/filesystems").read_text() else "the kernel has no overlay"


@ability("fuse")
def _fuse() -> str:
    if os.geteuid() != 0:
        return "mounting FUSE here needs root"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse can't be opened: {error.strerror}"
    return ""


@ability("fuse-resend")
def _fuse_resend() -> str:
    release = tuple(int(part) for part in platform.release().split(".")[:2])
    return "" if release >= (6, 9) else f"Linux {platform.release()} has no FUSE_NOTIFY_RESEND (6.9)"


@ability("xfs")
def _xfs() -> str:
    return "" if "\txfs\n" in Path("/proc/filesystems").read_text() else "the kernel has no xfs"


@ability("btrfs")
def _btrfs() -> str:
    return "" if "btrfs" in Path("/proc/filesystems").read_text() else "the kernel has no btrfs"


@ability("cgroup")
def _cgroup() -> str:
    if not os.access("/sys/fs/cgroup", os.W_OK):
        return "/sys/fs/cgroup is not writable"
    unified = Path("/sys/fs/cgroup/cgroup.procs").exists() or Path("/sys/fs/cgroup/unified/cgroup.procs").exists()
    return "" if unified else "no cgroup2 hierarchy is mounted"


@ability("frozen_usec")
def _frozen_usec() -> str:
    if any(Path("/sys/fs/cgroup").glob("**/cgroup.stat.local")):
        return ""
    return "this kernel does not count how long a cgroup was frozen (Linux 6.18)"


@ability("userns")
def _userns() -> str:
    done = subprocess.run(["unshare", "-U", "true"], capture_output=True, timeout=10, check=False)
    return "" if done.returncode == 0 else done.stderr.decode().strip()


@ability("netns")
def _netns() -> str:
    done = subprocess.run(["unshare", "-n", "true"], capture_output=True, timeout=10, check=False)
    return "" if done.returncode == 0 else done.stderr.decode().strip()


@ability("language-image")
def _language_image() -> str:
    store = os.environ.get("DSEC_TEST_LANGUAGES", "")
    if store and any(Path(store, "refs").glob("debian-languages*")):
        return ""
    return (
        "DSEC_TEST_LANGUAGES names no image store with `debian-languages` (see tests/system/fncall/test_languages.py)"
    )


@ability("moto")
def _moto() -> str:
    found = all(importlib.util.find_spec(name) for name in ("botocore", "moto", "flask_cors"))
    return "" if found else "moto's S3 server is not installed: pip install 'nomad-dsec[dev]'"


@ability("docker")
def _docker() -> str:
    if not shutil.which("docker"):
        return "docker is not on PATH"
    done = subprocess.run(["docker", "info"], capture_output=True, timeout=15, check=False)
    return "" if done.returncode == 0 else "no docker engine answers"


@ability("kvm")
def _kvm() -> str:
    if Path("/sys/module/kvm_pvm").exists():
        return "/dev/kvm is PVM: ordinary guest kernels do not boot on it"
    flags = Path("/proc/cpuinfo").read_text()
    if " vmx" not in flags and " svm" not in flags:
        return "the CPU shows neither vmx nor svm"
    return "" if os.access("/dev/kvm", os.R_OK | os.W_OK) else "/dev/kvm can't be opened"


@ability("debian-packages")
def _debian_packages() -> str:
    done = subprocess.run(["apt-cache", "policy", "hello"], capture_output=True, timeout=30, check=False)
    return (
        "" if b"Candidate: (none)" not in done.stdout and done.stdout else "apt knows no packages: run apt-get update"
    )


@ability("landlock")
def _landlock() -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    abi = libc.syscall(444, None, 0, 1)
    return "" if abi > 0 else f"landlock is off: {os.strerror(ctypes.get_errno())}"


@ability("landlock-scopes")
def _landlock_scopes() -> str:
    abi = ctypes.CDLL(None, use_errno=True).syscall(444, None, 0, 1)
    return "" if abi >= 6 else f"landlock has ABI {abi}; scopes came with 6 (Linux 6.12)"


@ability("fusion-clients")
def _fusion_clients() -> str:
    try:
        peers_home()
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        return f"verl's and SandboxFusion's clients can't be installed: {error}"
    return ""


@ability("ext4-prjquota")
def _ext4_prjquota() -> str:
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4"):
        return "needs root and mkfs.ext4"
    with tempfile.TemporaryDirectory() as directory:
        image, point = Path(directory, "image"), Path(directory, "point")
        make_prjquota_image(image)
        point.mkdir()
        argv = ["mount", "-o", "loop,prjquota", str(image), str(point)]
        done = subprocess.run(argv, capture_output=True, timeout=20, check=False)
        if done.returncode != 0:
            return f"ext4 with prjquota can't be mounted: {done.stderr.decode().strip().splitlines()[0]}"
        subprocess.run(["umount", "-d", str(point)], timeout=20, check=True)
    return ""


def make_prjquota_image(path: Path) -> None:
    """A file that holds an ext4 with project quotas on."""
    with path.open("wb") as file:
        file.truncate(64 << 20)
    argv = ["mkfs.ext4", "-q", "-O", "project,quota", "-E", "quotatype=prjquota", str(path)]
    subprocess.run(argv, capture_output=True, timeout=30, check=True)


@ability("call-root")
def _call_root() -> str:
    return "" if Path(CALL_ROOT).is_file() else f"no {CALL_ROOT}: this is no test machine (see tests/kit/vm/machine.py)"


@ability("test-kernel")
def _test_kernel() -> str:
    return "" if kernel() else "DSEC_TEST_KERNEL names no kernel for test machines (see tests/kit/vm/machine.py)"
