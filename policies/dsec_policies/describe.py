"""The effective policy as a user reads it: what holds, by which layer, what doesn't, and every hole. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsec_policies.capabilities import names_of
from dsec_policies.clauses import CLAUSES
from dsec_policies.profiles import PROFILES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsec_policies.compiled import CompiledPolicy

#: True of every container policy: they share the host's kernel.
SHARED_KERNEL = "the kernel is the host's: a bug in a system call that the profile allows is a way out"


def describe(compiled: CompiledPolicy, *, resolvers: Sequence[str] = ()) -> dict[str, Any]:
    """Returns plain data: profile, network, clauses with their layers, unenforced clauses, holes, digest.

    ``resolvers``: the addresses that this host lets an open network ask on port 53, which are a hole of the host's.
    """
    return {
        "profile": compiled.policy.profile,
        "summary": PROFILES[compiled.policy.profile].summary,
        "network": compiled.network,
        "protected_paths": list(compiled.protected_paths),
        "capabilities": list(names_of(compiled.capabilities)),
        "rlimits": {name: [soft, hard] for name, soft, hard in compiled.rlimits},
        "clauses": [
            {"clause": item.clause, "title": CLAUSES[item.clause].title, "layers": list(item.layers)}
            for item in compiled.enforced
        ],
        "unenforced": [
            {"clause": item.clause, "title": CLAUSES[item.clause].title, "reason": item.reason}
            for item in compiled.unenforced
        ],
        "holes": list(_holes(compiled, resolvers)),
        "digest": compiled.digest,
    }


def _holes(compiled: CompiledPolicy, resolvers: Sequence[str]) -> list[str]:
    holes = [SHARED_KERNEL]
    if compiled.network == "open":
        holes.append("every public IPv4 address is reachable on every port by TCP and UDP; names are not checked")
        if resolvers:
            holes.append(f"the resolvers {', '.join(resolvers)} answer any name on port 53: questions carry data out")
    if compiled.policy.profile == "debug":
        holes.append("programs may trace and rewrite each other, other users' too (ptrace, process_vm_*)")
    if not compiled.no_new_privs:
        holes.append("set-uid programs become their owner, within the sandbox's own range of ids")
    if compiled.protected_paths:
        holes.append(
            "a protected path keeps its content and place; what a program loads beside it is not covered "
            "(libraries, /etc/ld.so.preload, start-up files) unless it is protected as well"
        )
    holes += [f"not enforced: {CLAUSES[item.clause].title} ({item.reason})" for item in compiled.unenforced]
    return holes
