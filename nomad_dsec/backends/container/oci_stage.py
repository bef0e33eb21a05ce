"""The process that prepares a bundle and has an OCI runtime start it: `python -m ...oci_stage`, one run a container.

Single-threaded and short-lived, so it may change its own namespaces. All mounts are made in a mount namespace of its
own below a private tmpfs, so that nothing of a bundle is ever on the host: what remains is the container's own.
Reads one JSON request from stdin (oci.py writes it), prints one JSON reply.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nomad_dsec.backends.container.mount_owners import open_sources
from nomad_dsec.backends.container.oci_bundle import LISTEN_FD, PRESERVED
from nomad_dsec.backends.container.oci_rootfs import STRICT, Rootfs
from nomad_dsec.backends.container.plan import INIT_NICE
from nomad_dsec.linux.cgroup import remove_tree
from nomad_dsec.linux.cgroup_files import write_file
from nomad_dsec.linux.idmap import UidRange, clone_idmapped, open_userns
from nomad_dsec.linux.syscalls import (
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWUSER,
    MNT_DETACH,
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    OPEN_TREE_CLONE,
    mount,
    mount_setattr,
    move_mount,
    open_tree,
    setns,
    umount2,
    unshare,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

# Hidden by the private tmpfs while we run: it exists everywhere, and anyone may pass through it.
_STAGE: Final = "/run"
_SEALED: Final = MS_NOSUID | MS_NODEV | MS_NOEXEC
_RUNTIME_TIMEOUT_S: Final = 15
_LIFTED: Final = 64


class Steps:
    """Which step is under way, and how long each took."""

    def __init__(self) -> None:
        self.current = ""
        self.ms: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a block; an exception leaves `current` at its name."""
        self.current = name
        began = time.perf_counter()
        yield
        self.ms[name] = (time.perf_counter() - began) * 1000


class RuntimeRefused(Exception):
    """The OCI runtime ended with an error; the text is its log's end."""


def stage(request: dict[str, Any], steps: Steps) -> int:
    """Prepare and start; the container's pid in our pid namespace."""
    owner = int(request["uid_base"])
    with steps.step("userns"):
        userns = open_userns(UidRange(base=owner, size=int(request["uid_count"])).uid_map)
    # Opened here, since one of the hierarchies may be hidden from the runtime.
    request["join_fds"] = [os.open(path, os.O_WRONLY | os.O_CLOEXEC) for path in request["join"]]
    with steps.step("namespaces"):
        unshare(CLONE_NEWNS)
        mount(None, "/", None, MS_REC | MS_PRIVATE)
        setns(int(request["net_fd"]), CLONE_NEWNET)
        for hidden in request["hide"]:
            umount2(hidden, MNT_DETACH)
    with steps.step("overlay"):
        _make_root(request, userns)
    os.close(userns)
    root_fd = os.open(f"{_STAGE}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    rootfs = Rootfs(root_fd, owner)
    with steps.step("files"):
        _fill_root(request, rootfs)
    with steps.step("protected"):
        for path in request["protected"]:
            rootfs.pin(path)
            rootfs.seal(path)
    with steps.step("sysfs"):
        # By us, since a runtime inside the user namespace may not: the network namespace is the host's. And last, so
        # that a link of the image to /sys has led nothing above into it.
        rootfs.make_dirs("/sys")
        with rootfs.opened("/sys", os.O_PATH | os.O_DIRECTORY, resolve=STRICT) as at:
            mount("sysfs", f"/proc/self/fd/{at}", "sysfs", _SEALED | MS_RDONLY)
    os.close(root_fd)
    Path(_STAGE, "config.json").write_text(json.dumps(request["config"]), encoding="utf-8")
    argv = [*request["runtime"], "--root", f"{_STAGE}/state", "--log", f"{_STAGE}/log"]
    with suppress(PermissionError):  # as the native launcher's operation `nice`; inherited by the container's process
        os.setpriority(os.PRIO_PROCESS, 0, INIT_NICE)
    with steps.step("create"):
        options = ["--bundle", _STAGE, "--pid-file", f"{_STAGE}/pid", "--preserve-fds", str(PRESERVED)]
        _runtime([*argv, "create", *options, request["id"]], request)
    pid = int(Path(_STAGE, "pid").read_text(encoding="ascii"))
    with steps.step("leave"):
        for mounted in request["leave"]:
            _leave(pid, mounted, request["cgroup"])
    with steps.step("sysctls"):
        _write_sysctls(pid, request["sysctls"])
    with steps.step("start"):
        _runtime([*argv, "start", request["id"]], request)
    return pid


def _make_root(request: dict[str, Any], userns: int) -> None:
    upper = request["upper"]
    # Sources are opened before /run is covered: they may lie below it.
    lower = clone_idmapped(request["rootfs"], userns)
    layers = open_tree(os.path.dirname(upper["upper"]), OPEN_TREE_CLONE) if "upper" in upper else -1
    mounts = [(item["source"], item["owners"]) for item in request["mounts"]]
    request["mount_fds"] = open_sources(mounts, request["uid_base"])
    mount("dsec", _STAGE, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=256,mode=755")
    os.chdir(_STAGE)
    for name in ("lower", "up", "root", "state"):
        Path(name).mkdir(mode=0o755)
    move_mount(lower, f"{_STAGE}/lower")
    os.close(lower)
    if layers >= 0:
        move_mount(layers, f"{_STAGE}/up")
        os.close(layers)
        names = os.path.basename(upper["upper"]), os.path.basename(upper["work"])
    else:
        data = f"size={upper['size_bytes']},nr_inodes={upper['inodes']},mode=700"
        mount("tmpfs", f"{_STAGE}/up", "tmpfs", MS_NODEV, data)
        names = "u", "w"
        Path("up/u").mkdir(mode=0o755)
        Path("up/w").mkdir(mode=0o700)
    shown = Path("lower").stat()  # what stat("/") is to say inside
    os.chown(f"up/{names[0]}", shown.st_uid, shown.st_gid)
    Path(f"up/{names[0]}").chmod(shown.st_mode & 0o7777)
    data = f"lowerdir=lower,upperdir=up/{names[0]},workdir=up/{names[1]}"
    mount("overlay", f"{_STAGE}/root", "overlay", MS_NODEV, data)


def _fill_root(request: dict[str, Any], rootfs: Rootfs) -> None:
    for path, text in request["files"]:
        rootfs.write_file(path, text.encode(), mode=0o644)
    if request["secrets"]:
        _show_secrets(request, rootfs)
    for item, fd in zip(request["mounts"], request["mount_fds"], strict=True):
        attributes = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | (MOUNT_ATTR_RDONLY if item["read_only"] else 0)
        mount_setattr(fd, set_attrs=attributes, subject=item["source"])
        is_file = not Path(f"/proc/self/fd/{fd}").is_dir()
        rootfs.attach(fd, item["target"], is_file=is_file)
        os.close(fd)


def _show_secrets(request: dict[str, Any], rootfs: Rootfs) -> None:
    directory, owner = request["secrets_dir"], request["uid_base"]
    contents = {name: base64.b64decode(text) for name, text in request["secrets"].items()}
    size = sum(map(len, contents.values())) + len(contents) * 4096 + (1 << 20)
    rootfs.make_dirs(directory)
    with rootfs.opened(directory, os.O_PATH | os.O_DIRECTORY) as at:
        data = f"size={size},nr_inodes={len(contents) + 8},mode=755,uid={owner},gid={owner}"
        mount("tmpfs", f"/proc/self/fd/{at}", "tmpfs", _SEALED, data)
    for name, content in contents.items():
        rootfs.write_file(f"{directory}/{name}", content, mode=0o400, uid=request["secrets_uid"])
    with rootfs.opened(directory, os.O_PATH | os.O_DIRECTORY) as at:
        mount(None, f"/proc/self/fd/{at}", None, MS_REMOUNT | _SEALED | MS_RDONLY, data)


def _runtime(argv: list[str], request: dict[str, Any]) -> None:
    """Run the OCI runtime with the container's descriptors at 3, 4, ... and, like the container, in its cgroups."""

    def enter() -> None:  # in the child; it has one thread
        try:
            for fd in request["join_fds"]:
                os.write(fd, b"0")
            for number, fd in enumerate(request["fds"], LISTEN_FD):
                os.dup2(fd, number)
        except OSError as error:
            Path(_STAGE, "log").write_text(f"before the runtime: {error}", encoding="utf-8")
            os._exit(126)

    # crun gives its standard descriptors to the container's root by fchown(2); with /dev/null that would be the host's
    # own node, so the runtime gets an empty file of nobody's instead.
    nothing = os.memfd_create("stdio", os.MFD_CLOEXEC)
    done = subprocess.run(
        argv,
        stdin=nothing,
        stdout=nothing,
        stderr=nothing,
        env={"PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")},
        preexec_fn=enter,
        close_fds=False,
        timeout=_RUNTIME_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        log = Path(_STAGE, "log")
        said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        raise RuntimeRefused(f"{argv[0]} ended with {done.returncode}: {said.strip()[-600:]}")


def _leave(pid: int, mounted: str, name: str) -> None:
    """Out of the cgroups that runc makes in every v1 hierarchy, and those away: nobody would remove them later."""
    if Path(mounted, name).is_dir():
        write_file(f"{mounted}/cgroup.procs", str(pid))
        remove_tree(f"{mounted}/{name}")
        with suppress(OSError):
            Path(mounted, name).parent.rmdir()  # the node's directory, when no other start is under way


def _write_sysctls(pid: int, values: list[list[str]]) -> None:
    """Write user.* of the container's user namespace: its own root can't, once /proc/sys is read-only."""
    with open(f"/proc/{pid}/ns/user", "rb") as namespace:
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            if status:
                raise OSError(os.waitstatus_to_exitcode(status), "write sysctls", f"user namespace of {pid}")
            return
        code = 1
        try:
            setns(namespace.fileno(), CLONE_NEWUSER)
            os.setgroups([])
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
            for name, value in values:
                Path("/proc/sys", *name.split(".")).write_text(value, encoding="ascii")
            code = 0
        except OSError as error:
            code = error.errno or 1
        finally:
            os._exit(code)


def main() -> int:
    """Read, act, report."""
    request = json.load(sys.stdin)
    steps = Steps()
    try:
        # Above all numbers that are about to be given to the runtime.
        reply: dict[str, Any] = {"pid": stage(_lifted(request), steps), "steps_ms": steps.ms}
    except (OSError, RuntimeRefused, subprocess.TimeoutExpired, ValueError) as error:
        number = error.errno if isinstance(error, OSError) else None
        subject = str(error.filename or "") if isinstance(error, OSError) else ""
        reply = {"step": steps.current, "errno": number or 0, "detail": str(error), "subject": subject}
    sys.stdout.write(json.dumps(reply))
    return 0


def _lifted(request: dict[str, Any]) -> dict[str, Any]:
    """Move the descriptors out of the way of the numbers that the runtime is to get, and keep those numbers taken."""

    def lift(fd: int) -> int:
        lifted = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _LIFTED)
        os.close(fd)
        return lifted

    lifted = request | {"fds": [lift(fd) for fd in request["fds"]], "net_fd": lift(request["net_fd"])}
    while os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC) < LISTEN_FD + PRESERVED:
        pass  # else a pipe that subprocess needs itself could have one of them
    return lifted


if __name__ == "__main__":
    sys.exit(main())
