"""Whose the files of a host directory are inside: as they are, or mapped so that a cluster's task can use them.

"": ids of the host, which inside are all nobody's. "task": what belongs to nobody on the host, as a cluster's clients
make the directories of a task, is root's inside, and the other way round; so tasks of one allocation share what their
roots write, and no id that means something on the host is ever written. "host": ids of the host as they are, to read.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from nomad_dsec.backends.container.spec import UID_RANGE
from nomad_dsec.linux.idmap import open_userns
from nomad_dsec.linux.syscalls import MOUNT_ATTR_IDMAP, OPEN_TREE_CLONE, SyscallError, mount_setattr, open_tree
from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from collections.abc import Iterable

log = get_log(__name__)
NOBODY: Final = 65_534


def id_map(owners: str, base: int) -> str:
    """Lines of uid_map(5) for an id-mapped mount: id on disk, id as the kernel has it, how many."""
    if owners == "task":
        return f"{NOBODY} {base} 1\n{base + 1} {base + 1} {UID_RANGE - 1}\n"
    return f"0 {base} {UID_RANGE}\n"


def open_sources(mounts: Iterable[tuple[str, str]], base: int) -> list[int]:
    """A detached copy of each (source, owners), mapped for the sandbox whose root is `base`; the caller closes them.

    Forks for each kind of map: not for the event loop. A file system that takes no map (tmpfs before Linux 6.3) is
    shown as it is, with a line in the log.
    """
    opened: list[int] = []
    spaces: dict[str, int] = {}
    try:
        for source, owners in mounts:
            opened.append(open_tree(source, OPEN_TREE_CLONE))
            if owners and owners not in spaces:
                spaces[owners] = open_userns(id_map(owners, base))
            if owners:
                _map(opened[-1], spaces[owners], source)
    except BaseException:
        for fd in opened:
            os.close(fd)
        raise
    finally:
        for fd in spaces.values():
            os.close(fd)
    return opened


def _map(fd: int, userns: int, source: str) -> None:
    try:
        mount_setattr(fd, set_attrs=MOUNT_ATTR_IDMAP, userns_fd=userns, subject=source)
    except SyscallError as error:
        log.warning("a directory is shown with the host's owners", source=source, error=str(error))
