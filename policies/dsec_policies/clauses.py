"""The clauses that every policy is made of, and the layers that can enforce each. Data only.

A clause holds when at least one of its layers can be had on the host; every layer that can be had is used. A layer
that names no ability rests only on what any supported kernel has.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One mechanism and the host abilities that it needs, all of them."""

    name: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Clause:
    """One promise: ``title`` is how a user reads it; ``may_be_advisory`` whether a caller may do without."""

    title: str
    layers: tuple[Layer, ...]
    may_be_advisory: bool = True


_USERNS = Layer(name="user namespace", needs=("user_namespaces",))

CLAUSES: Mapping[str, Clause] = MappingProxyType(
    {
        "user_namespace": Clause(
            title="root inside is nobody outside, with a range of ids of its own",
            layers=(_USERNS,),
            may_be_advisory=False,
        ),
        "system_calls": Clause(
            title="only listed system calls, with checked arguments",
            layers=(Layer(name="seccomp", needs=("seccomp_filter",)),),
            may_be_advisory=False,
        ),
        "capabilities": Clause(
            title="capabilities outside the profile are gone from every set",
            layers=(Layer(name="capability bounding set"),),
            may_be_advisory=False,
        ),
        "nested_namespaces": Clause(
            title="no new namespaces inside",
            layers=(
                Layer(name="seccomp", needs=("seccomp_filter",)),
                Layer(name="user.max_*_namespaces = 0", needs=("user_namespaces",)),
            ),
        ),
        "new_privileges": Clause(
            title="set-uid programs gain nothing",
            layers=(Layer(name="no_new_privs"),),
            may_be_advisory=False,
        ),
        "masked_paths": Clause(
            title="kernel files that show the host are empty",
            layers=(Layer(name="mount namespace"),),
            may_be_advisory=False,
        ),
        "read_only_paths": Clause(
            title="kernel settings can be read, not written",
            layers=(Layer(name="mount namespace"), _USERNS),
            may_be_advisory=False,
        ),
        "protected_paths": Clause(
            title="protected paths keep the image's content and place",
            layers=(Layer(name="read-only mount, path pinned", needs=("user_namespaces",)),),
        ),
        "devices": Clause(
            title="no device but null, zero, full, random, urandom, tty and terminals",
            layers=(_USERNS, Layer(name="nodev mounts")),
            may_be_advisory=False,
        ),
        "abstract_sockets": Clause(
            title="no abstract unix socket of the host or of a neighbour",
            layers=(
                Layer(name="network namespace", needs=("net_namespaces",)),
                Layer(name="Landlock scope", needs=("landlock_scopes",)),
            ),
        ),
        "signals": Clause(
            title="no signal to a process outside",
            layers=(
                Layer(name="pid namespace", needs=("pid_namespaces",)),
                Layer(name="Landlock scope", needs=("landlock_scopes",)),
            ),
        ),
        "resource_limits": Clause(
            title="limits per process on files, core dumps, locked memory and message queues",
            layers=(Layer(name="rlimits"),),
            may_be_advisory=False,
        ),
        "network_none": Clause(
            title="nothing is reachable but the sandbox's own loopback",
            layers=(Layer(name="network namespace", needs=("net_namespaces",)),),
            may_be_advisory=False,
        ),
        "network_open": Clause(
            title="the internet is reachable; special addresses, the host and neighbours are not",
            layers=(Layer(name="network namespace and nftables", needs=("net_namespaces", "nftables", "veth")),),
            may_be_advisory=False,
        ),
    }
)
