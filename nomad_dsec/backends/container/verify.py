"""Before the first user command the forbidden is tried inside: a policy that does not hold fails the start."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING

from dsec_policies.forbidden import probe_commands
from libdsec.errors import PlatformError

from nomad_dsec.guest.spec import PolicyAttempt

if TYPE_CHECKING:
    from dsec_policies.compiled import CompiledPolicy

    from nomad_dsec.guest.channel import GuestChannel

PROBE_TIMEOUT_S = 10.0


async def verify_policy(channel: GuestChannel, compiled: CompiledPolicy) -> None:
    """Let dsec-init try the forbidden with an exec's rights. PlatformError policy_not_enforced names what worked."""
    clauses, attempts = _attempts(compiled)
    findings = await channel.policy_probe(attempts, timeout_s=PROBE_TIMEOUT_S)
    wrong = [
        f"{clause}: {_shown(found.attempt)} gave {_outcome(found.errno)}"
        for clause, found in zip(clauses, findings, strict=True)
        if found.errno not in found.attempt.errnos
    ]
    if wrong:
        raise PlatformError(
            "policy_not_enforced",
            f"the policy does not hold in the new sandbox: {'; '.join(wrong)}",
            hint="report this: the sandbox was removed before anything ran in it",
            details={"step": "probe policy"},
        )


def _shown(attempt: PolicyAttempt) -> str:
    return f"{attempt.kind} {os.fsdecode(attempt.target) or ' '.join(map(str, attempt.args))}"


def _outcome(number: int) -> str:
    if number == 0:
        return "success"
    return f"signal {number - 1000}" if number > 1000 else os.strerror(number)


@lru_cache(maxsize=64)
def _attempts(compiled: CompiledPolicy) -> tuple[tuple[str, ...], tuple[PolicyAttempt, ...]]:
    tried = probe_commands(compiled)
    attempts = tuple(
        PolicyAttempt(kind=item.kind, args=item.args, target=os.fsencode(item.target), errnos=item.errnos)
        for item in tried
    )
    return tuple(item.clause for item in tried), attempts
