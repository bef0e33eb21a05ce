"""A Debian (or Ubuntu) root made here by debootstrap and apt, in a mount and PID namespace that dies with the import.

debootstrap makes the minimal base; the wanted packages are installed by the new root's own apt, because debootstrap's
resolver knows no virtual packages (bookworm's gdb, for one, can't be had by it).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from dsec_imagefs.errors import ImageError, SyscallError
from dsec_imagefs.image import ImageConfig
from dsec_imagefs.sources.apt import Archive, choose_archives, read_archives, without_credentials
from dsec_imagefs.sources.base import LayerSource, Material, Work
from dsec_imagefs.sources.directory import scan_directory
from dsec_imagefs.syscalls import MS_NOATIME, mount_fs
from dsec_imagefs.tools import need_tool, run_tool
from dsec_imagefs.tree import BytesContent, Node, Tree, split_path

if TYPE_CHECKING:
    from collections.abc import Iterator

RECIPE = 1  # part of the cache key; raise it when what is built or tidied changes
TIMEOUT_S = 1800.0
MEMORY_BUILD_BYTES = 4 << 30  # upper bound of a root built in memory

_SUITE = re.compile(r"[a-z][a-z0-9-]{1,40}")
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9.+-]{1,100}")
_MIRROR = re.compile(r"(?:https?|file)://[^\s'\"]+")

# Files of this host or of this run, which no image should carry; a trailing slash empties a directory.
_EMPTIED = (b"var/cache/apt/", b"var/cache/apt/archives/", b"var/cache/apt/archives/partial/", b"var/lib/apt/lists/")
_REMOVED = (
    b"var/log/bootstrap.log", b"var/log/dpkg.log", b"var/log/alternatives.log", b"var/log/apt/term.log",
    b"var/log/apt/history.log", b"var/cache/ldconfig/aux-cache", b"etc/dpkg/dpkg.cfg.d/dsec-unsafe-io",
    b"usr/sbin/policy-rc.d", b"debootstrap",
)  # fmt: skip
_REPLACED = {b"etc/hostname": b"localhost\n", b"etc/resolv.conf": b"", b"etc/machine-id": b""}


@dataclass(frozen=True, slots=True, kw_only=True)
class DebootstrapSource:
    """``debootstrap:SUITE``, with packages to include and an archive other than the host's."""

    suite: str
    include: tuple[str, ...] = ()
    mirror: str = ""

    @property
    def label(self) -> str:
        """The source string, rebuilt from checked parts."""
        query = [f"include={','.join(self.include)}"] if self.include else []
        query += [f"mirror={without_credentials(self.mirror)}"] if self.mirror else []
        return f"debootstrap:{self.suite}" + (f"?{'&'.join(query)}" if query else "")

    @property
    def cache_key(self) -> str:
        """Hash over the recipe, suite, packages, archive and machine type."""
        parts = [RECIPE, self.suite, sorted(self.include), self.mirror, os.uname().machine]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    @contextmanager
    def open(self, work: Work) -> Iterator[Material]:
        """Build the root in the work directory and scan it."""
        if os.geteuid() != 0:
            raise ImageError("unsupported", "debootstrap has to run as root", "use another source", "source")
        root = work.tmp / "root"
        archives = self._archives()
        debs = work.cache / "debs"
        debs.mkdir(mode=0o700, exist_ok=True)
        _Build(root=root, debs=debs, work=work).run(self, archives)
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            tree = scan_directory(root, fd, work.report, work.note)
            tidy(tree, archives)
            env = ("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",)
            yield Material(
                layers=(LayerSource(open=lambda _stack: tree),), config=ImageConfig(env=env, cmd=("/bin/bash",))
            )
        finally:
            os.close(fd)

    def _archives(self) -> list[Archive]:
        if self.mirror:
            return [Archive(uri=self.mirror, suite=self.suite, components=("main",))]
        return choose_archives(self.suite, read_archives())


def parse_debootstrap(text: str) -> DebootstrapSource:
    """Parse ``SUITE[?include=a,b&mirror=URL]``; raises ImageError ``bad_source``."""
    suite, _, query = text.partition("?")
    options = {key: values[-1] for key, values in parse_qs(query, keep_blank_values=True).items()}
    unknown = sorted(options.keys() - {"include", "mirror"})
    # A + in a query is a space to parse_qs, and package names have it: g++.
    include = tuple(dict.fromkeys(p for p in options.get("include", "").replace(" ", "+").split(",") if p))
    wrong = [p for p in include if not _PACKAGE.fullmatch(p)]
    mirror = options.get("mirror", "")
    if not _SUITE.fullmatch(suite):
        problem = f"{suite!r} is no suite"
    elif unknown:
        problem = f"unknown option {unknown[0]!r}"
    elif wrong:
        problem = f"{wrong[0]!r} is no package name"
    elif mirror and not _MIRROR.fullmatch(mirror):
        problem = f"{without_credentials(mirror)!r} is no archive address"
    else:
        return DebootstrapSource(suite=suite, include=include, mirror=mirror)
    raise ImageError("bad_source", problem, "debootstrap:bookworm?include=python3,git&mirror=http://...", "source")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Build:
    root: Path
    debs: Path
    work: Work

    def run(self, source: DebootstrapSource, archives: list[Archive]) -> None:
        debootstrap = need_tool("debootstrap", "debootstrap")
        self._prepare()
        progress = _Lines(self.work)
        argv = [debootstrap, "--variant=minbase", "--force-check-gpg", f"--cache-dir={self.debs}"]
        argv += [source.suite, str(self.root), *([archives[0].uri] if archives else [])]
        run_tool([*_isolated(), *argv], timeout_s=TIMEOUT_S, on_line=progress)
        if source.include:
            self._install(source.include, archives, progress)

    def _prepare(self) -> None:
        self._use_memory()
        # The root is thrown away when anything fails, so dpkg's own syncs only cost time.
        config = self.root / "etc/dpkg/dpkg.cfg.d"
        config.mkdir(mode=0o755, parents=True)
        self.root.chmod(0o755)
        (config / "dsec-unsafe-io").write_text("force-unsafe-io\n")

    def _use_memory(self) -> None:
        """Build in a memory file system where there is plenty: tens of thousands of small files that go at once.

        On disks mounted with discard, removing the tree again took a third of the whole import.
        """
        self.root.mkdir(mode=0o755)
        if available_memory_bytes() < 2 * MEMORY_BUILD_BYTES:
            return
        try:
            mount_fs("tmpfs", self.root, "tmpfs", MS_NOATIME, f"mode=0755,size={MEMORY_BUILD_BYTES}")
        except SyscallError as err:
            self.work.note(f"built on disk: {err.message}")

    def _install(self, packages: tuple[str, ...], archives: list[Archive], progress: _Lines) -> None:
        policy = self.root / "usr/sbin/policy-rc.d"
        policy.write_text("#!/bin/sh\nexit 101\n")  # 101: the package scripts start nothing
        policy.chmod(0o755)
        if archives:
            lines = [f"deb {a.uri} {a.suite} {' '.join(a.components)}\n" for a in archives]
            (self.root / "etc/apt/sources.list").write_text("".join(lines))
        pool = self.root / "var/cache/apt/archives"
        for deb in self.debs.glob("*.deb"):
            if not (pool / deb.name).exists():
                shutil.copyfile(deb, pool / deb.name)
        inside = [*_isolated(), f"--root={self.root}", "--mount-proc", "/usr/bin/apt-get", "-q", "-y"]
        env = {"DEBIAN_FRONTEND": "noninteractive"}
        run_tool([*inside, "update"], timeout_s=TIMEOUT_S, on_line=progress, env=env)
        options = ["-o", "APT::Keep-Downloaded-Packages=true", "--no-install-recommends", "install"]
        run_tool([*inside, *options, *packages], timeout_s=TIMEOUT_S, on_line=progress, env=env)
        for deb in pool.glob("*.deb"):
            kept = self.debs / deb.name
            if not kept.exists():
                partial = kept.with_suffix(".partial")
                shutil.copyfile(deb, partial)
                partial.rename(kept)


def available_memory_bytes() -> int:
    """What the kernel thinks could be used without swapping: MemAvailable of proc(5)."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(match[1]) << 10 if match else 0


def _isolated() -> list[str]:
    """Own mounts and processes, both gone when the command ends or we die: unshare(1)."""
    tool = need_tool("unshare", "util-linux")
    return [tool, "--mount", "--propagation=private", "--pid", "--fork", "--kill-child=KILL"]


class _Lines:
    """Turns the tools' talk into steps of progress."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._fetched = 0
        self._done = 0
        self._total = 0

    def __call__(self, line: str) -> None:
        if line.startswith(("I: Retrieving ", "Get:")):
            self._fetched += 1
            self._work.progress("download", self._fetched, 0)
        elif match := re.match(r"(\d+) upgraded, (\d+) newly installed", line):
            self._total = 2 * (int(match[1]) + int(match[2]))
            self._done = 0
        elif line.startswith(("I: Unpacking ", "I: Configuring ", "Unpacking ", "Setting up ")):
            self._done += 1
            self._work.progress("install", self._done, self._total)


def tidy(root: Node, archives: list[Archive]) -> None:
    """Take out of a fresh root what belongs to this host or this run, and name the archives without credentials."""
    tree = Tree(root)
    for path in _EMPTIED:
        folder = tree.directory(split_path(path), make=False)
        if folder is not None:
            folder.children = {name: node for name, node in folder.children.items() if node.is_dir}
    for path in _REMOVED:
        *parents, name = split_path(path)
        folder = tree.directory(parents, make=False)
        if folder is not None:
            folder.children.pop(name, None)
    replaced = dict(_REPLACED)
    if archives:
        replaced[b"etc/apt/sources.list"] = "".join(a.line() for a in archives).encode()
    for path, data in replaced.items():
        *parents, name = split_path(path)
        folder = tree.directory(parents, make=True)
        assert folder is not None
        folder.children[name] = Node(fmt=0o100000, mode=0o644, content=BytesContent(data))
