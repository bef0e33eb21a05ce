"""Turns a policy into what this host enforces, or refuses: no clause is dropped in silence. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from dsec_policies.capabilities import mask_of
from dsec_policies.clauses import CLAUSES, Layer
from dsec_policies.compiled import CompiledPolicy, Enforced, Unenforced
from dsec_policies.errors import PolicyError
from dsec_policies.landlock import Ruleset, compile_landlock
from dsec_policies.profiles import PROFILES, Profile
from dsec_policies.seccomp import AUDIT_ARCH, compile_seccomp

if TYPE_CHECKING:
    from dsec_policies.abilities import HostAbilities
    from dsec_policies.model import Policy


@lru_cache(maxsize=256)
def compile_policy(policy: Policy, abilities: HostAbilities) -> CompiledPolicy:
    """Returns ``policy`` compiled for a host with ``abilities``; cached, since most sandboxes share a policy.

    Raises PolicyError (code ``policy_unenforceable``) naming the clause when no layer of it can be had and the policy
    doesn't call it advisory.
    """
    if abilities.arch not in AUDIT_ARCH:
        raise PolicyError(
            "policy_unenforceable",
            f"there is no system call table for {abilities.arch}",
            hint=f"run the node on one of {', '.join(AUDIT_ARCH)}",
            field="policy",
        )
    enforced, unenforced = _settle(policy, abilities)
    profile = PROFILES[policy.profile]
    return CompiledPolicy(
        policy=policy,
        arch=abilities.arch,
        seccomp=_seccomp_of(profile.name, abilities.arch),
        capabilities=mask_of(profile.capabilities),
        init_capabilities=mask_of(profile.init_capabilities),
        no_new_privs=policy.no_new_privs,
        masked_paths=profile.masked_paths,
        read_only_paths=profile.read_only_paths,
        protected_paths=policy.protected_paths,
        devices=profile.devices,
        rlimits=_rlimits(policy, profile),
        sysctls=tuple(profile.sysctls.items()),
        landlock=_landlock(profile, abilities),
        network=policy.network,
        enforced=enforced,
        unenforced=unenforced,
    )


def clauses_of(policy: Policy) -> tuple[str, ...]:
    """Returns the names of the clauses that ``policy`` asks for, in the order of ``CLAUSES``."""
    left_out = {"network_none", "network_open"} - {f"network_{policy.network}"}
    if not policy.protected_paths:
        left_out.add("protected_paths")
    if not policy.no_new_privs:
        left_out.add("new_privileges")
    return tuple(name for name in CLAUSES if name not in left_out)


def _settle(policy: Policy, abilities: HostAbilities) -> tuple[tuple[Enforced, ...], tuple[Unenforced, ...]]:
    """Sorts the clauses into the ones that hold and the ones that the caller does without."""
    enforced: list[Enforced] = []
    unenforced: list[Unenforced] = []
    for name in clauses_of(policy):
        layers = tuple(layer for layer in CLAUSES[name].layers if not _lacking(layer, abilities))
        if layers:
            enforced.append(Enforced(clause=name, layers=tuple(layer.name for layer in layers)))
            continue
        reason = "; ".join(_lacking(layer, abilities) for layer in CLAUSES[name].layers)
        if name not in policy.advisory:
            raise _refusal(name, reason)
        unenforced.append(Unenforced(clause=name, reason=reason))
    return tuple(enforced), tuple(unenforced)


def _lacking(layer: Layer, abilities: HostAbilities) -> str:
    """Returns why ``layer`` can't be had, or the empty string."""
    missing = [name for name in layer.needs if not abilities.has(name)]
    reasons = ", ".join(f"{name}: {abilities.get(name).detail or 'absent'}" for name in missing)
    return f"{layer.name} needs {reasons}" if missing else ""


def _refusal(name: str, reason: str) -> PolicyError:
    clause = CLAUSES[name]
    hint = f"add {name!r} to policy.advisory to do without, or" if clause.may_be_advisory else "this can't be waived:"
    return PolicyError(
        "policy_unenforceable",
        f"{clause.title}: nothing on this host can enforce it ({reason})",
        hint=f"{hint} use a host that has it; dsec doctor lists what each host can do",
        field=name,
    )


@lru_cache(maxsize=16)
def _seccomp_of(profile: str, arch: str) -> bytes:
    return compile_seccomp(PROFILES[profile].syscalls, arch)


def _rlimits(policy: Policy, profile: Profile) -> tuple[tuple[str, int, int], ...]:
    limits = dict(profile.rlimits)
    if policy.nofile is not None:
        limits["NOFILE"] = (policy.nofile, policy.nofile)
    return tuple((name, soft, hard) for name, (soft, hard) in limits.items())


def _landlock(profile: Profile, abilities: HostAbilities) -> Ruleset:
    abi = abilities.get("landlock").value if abilities.has("landlock_scopes") else 0
    return compile_landlock(profile.landlock_scopes, abi=abi)
