"""What is tried in a new sandbox before the first user command: an attempt that succeeds fails the create. Pure."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsec_policies.seccomp import TABLES

if TYPE_CHECKING:
    from dsec_policies.compiled import CompiledPolicy

CLONE_NEWUSER = 0x1000_0000
#: TEST-NET-2 (RFC 5737): nobody's address, so only a route can make it reachable.
UNROUTED = "198.51.100.1 9"
#: The metadata address of every large cloud: refused under every policy.
METADATA = "169.254.169.254 80"
DENIED = (errno.EPERM, errno.EACCES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One forbidden thing, in the words of dsec-init's POLICY_PROBE, and the clause that it puts to the test.

    kind, args, target: open_read/open_write (target = path), socket (args = domain, type, protocol), connect
    (target = "ip port"), syscall (args = number, then its arguments). errnos: the acceptable outcomes; 0 is success.
    """

    clause: str
    kind: str
    args: tuple[int, ...] = ()
    target: str = ""
    errnos: tuple[int, ...] = DENIED


def probe_commands(compiled: CompiledPolicy) -> tuple[Attempt, ...]:
    """Returns the attempts for ``compiled``, the clauses that the caller does without left out."""
    held = {item.clause for item in compiled.enforced}
    unshare = TABLES[compiled.arch]["unshare"]
    attempts = [
        # EPERM is the filter's answer; without the filter the limit of zero namespaces would say ENOSPC.
        Attempt(clause="system_calls", kind="syscall", args=(unshare, CLONE_NEWUSER), errnos=(errno.EPERM,)),
        Attempt(
            clause="read_only_paths",
            kind="open_write",
            target="/proc/sys/kernel/core_pattern",
            errnos=(*DENIED, errno.EROFS),
        ),
        # A destination that no policy of this version opens, whatever the sandbox's network.
        _connect(compiled.network),
    ]
    attempts += [
        # A directory can't be opened for writing whatever its mount says; a file never gives EISDIR.
        Attempt(clause="protected_paths", kind="open_write", target=path, errnos=(errno.EROFS, errno.EISDIR))
        for path in compiled.protected_paths
    ]
    return tuple(attempt for attempt in attempts if attempt.clause in held)


def _connect(network: str) -> Attempt:
    if network == "none":
        return Attempt(clause="network_none", kind="connect", target=UNROUTED, errnos=(*DENIED, errno.ENETUNREACH))
    refused = (*DENIED, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ECONNREFUSED)
    return Attempt(clause="network_open", kind="connect", target=METADATA, errnos=refused)
