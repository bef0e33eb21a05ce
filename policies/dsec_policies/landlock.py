"""Landlock rulesets as data, and their packing for landlock_create_ruleset(2). Pure; the launcher installs them.

What Landlock does here: the *scopes* (no abstract unix socket and no signal out of the sandbox), as a second layer
behind the network and pid namespaces. Protected paths are enforced by read-only mounts, not by Landlock: it only
knows allow-lists and can't deny again below an allowed directory (landlock(7), design note policy.md section 3.1).

Layout, include/uapi/linux/landlock.h:
    struct landlock_ruleset_attr { u64 handled_access_fs; u64 handled_access_net; u64 scoped; }   24 bytes, ABI >= 6
    struct landlock_path_beneath_attr { u64 allowed_access; s32 parent_fd; } packed                 12 bytes
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

RULESET_ATTR = struct.Struct("<QQQ")
SCOPES = {"abstract_unix_socket": 1 << 0, "signal": 1 << 1}
#: The first ABI (landlock_create_ruleset with LANDLOCK_CREATE_RULESET_VERSION) that knows scopes: Linux 6.12.
ABI_WITH_SCOPES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruleset:
    """A ruleset to install with landlock_restrict_self(2) on PID 1, before it serves."""

    handled_fs: int = 0
    handled_net: int = 0
    scoped: int = 0

    def pack(self) -> bytes:
        """Returns struct landlock_ruleset_attr."""
        return RULESET_ATTR.pack(self.handled_fs, self.handled_net, self.scoped)

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to install; the kernel answers ENOMSG to an empty ruleset."""
        return not (self.handled_fs or self.handled_net or self.scoped)


def compile_landlock(scopes: Iterable[str], *, abi: int) -> Ruleset:
    """Returns the ruleset for ``scopes`` as far as ``abi`` knows them (0: no Landlock at all)."""
    if abi < ABI_WITH_SCOPES:
        return Ruleset()
    scoped = 0
    for scope in scopes:
        scoped |= SCOPES[scope]
    return Ruleset(scoped=scoped)
