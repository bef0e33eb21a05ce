"""What confines a lane: the default profile, but for what the set-up of calls needs from inside. Pure.

Set-up runs with CAP_SYS_ADMIN over the lane's own user namespace; programs of calls run without any capability, so the
three calls let through here answer EPERM to them, and `user.max_user_namespaces = 0` keeps them from getting one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from dsec_policies.capabilities import mask_of
from dsec_policies.compile import compile_policy
from dsec_policies.model import Policy
from dsec_policies.profiles import PROFILES
from dsec_policies.seccomp import compile_seccomp

if TYPE_CHECKING:
    from dsec_policies.abilities import HostAbilities
    from dsec_policies.compiled import CompiledPolicy

SET_UP_CALLS: Final = ("mount", "setns")
#: chown to the call's user, kill, the ids of the call's user, its bounding set, its namespaces and their root.
INIT_CAPABILITIES: Final = frozenset(
    "chown dac_override fowner kill setuid setgid setpcap sys_admin sys_chroot".split()
)
#: Freed by a kworker some time after the last process, so there is room for calls in quick succession.
_NAMESPACES: Final = 2048
_MADE_PER_CALL: Final = ("pid", "mnt", "ipc", "uts")


@lru_cache(maxsize=8)
def compile_lane_policy(abilities: HostAbilities) -> CompiledPolicy:
    """The policy of every lane on this host. PolicyError when the host can't enforce the default one."""
    compiled = compile_policy(Policy(), abilities)
    calls = PROFILES["default"].syscalls
    verdicts = dict(calls.verdicts) | dict.fromkeys(SET_UP_CALLS, "allow")
    syscalls = replace(calls, verdicts=MappingProxyType(verdicts))
    kinds = [name for name, _ in compiled.sysctls]
    made = {f"user.max_{kind}_namespaces" for kind in _MADE_PER_CALL}
    return replace(
        compiled,
        seccomp=compile_seccomp(syscalls, compiled.arch),
        capabilities=0,
        init_capabilities=mask_of(INIT_CAPABILITIES),
        # Calls see a procfs of processes only and no sysfs: there is nothing to mask.
        masked_paths=(),
        read_only_paths=(),
        sysctls=tuple((name, str(_NAMESPACES) if name in made else "0") for name in kinds),
    )
