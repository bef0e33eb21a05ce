"""Policies of sandboxes: a model, built-in profiles, and compilers to what a Linux host enforces.

``parse_policy(mapping) -> Policy``; ``probe() -> HostAbilities`` (in ``dsec_policies.probe``, the only module here
that touches the system); ``compile_policy(policy, abilities) -> CompiledPolicy``; ``describe(compiled)`` for people;
``probe_commands(compiled)`` for the attempts that must fail inside before the first user command.
"""

from dsec_policies.abilities import Ability, HostAbilities
from dsec_policies.compile import compile_policy
from dsec_policies.compiled import CompiledPolicy
from dsec_policies.describe import describe
from dsec_policies.errors import PolicyError
from dsec_policies.forbidden import Attempt, probe_commands
from dsec_policies.model import Policy, parse_policy

__all__ = [
    "Ability",
    "Attempt",
    "CompiledPolicy",
    "HostAbilities",
    "Policy",
    "PolicyError",
    "compile_policy",
    "describe",
    "parse_policy",
    "probe_commands",
]
