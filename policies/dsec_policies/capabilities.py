"""Linux capability names and the masks made of them (capabilities(7), include/uapi/linux/capability.h)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

NAMES: tuple[str, ...] = (
    "chown",
    "dac_override",
    "dac_read_search",
    "fowner",
    "fsetid",
    "kill",
    "setgid",
    "setuid",
    "setpcap",
    "linux_immutable",
    "net_bind_service",
    "net_broadcast",
    "net_admin",
    "net_raw",
    "ipc_lock",
    "ipc_owner",
    "sys_module",
    "sys_rawio",
    "sys_chroot",
    "sys_ptrace",
    "sys_pacct",
    "sys_admin",
    "sys_boot",
    "sys_nice",
    "sys_resource",
    "sys_time",
    "sys_tty_config",
    "mknod",
    "lease",
    "audit_write",
    "audit_control",
    "setfcap",
    "mac_override",
    "mac_admin",
    "syslog",
    "wake_alarm",
    "block_suspend",
    "audit_read",
    "perfmon",
    "bpf",
    "checkpoint_restore",
)
BITS: dict[str, int] = {name: bit for bit, name in enumerate(NAMES)}


def mask_of(names: Iterable[str]) -> int:
    """Returns the 64-bit mask of capability names, with or without ``CAP_`` and in any case.

    Raises KeyError for a name that Linux doesn't have.
    """
    mask = 0
    for name in names:
        mask |= 1 << BITS[name.lower().removeprefix("cap_")]
    return mask


def names_of(mask: int) -> tuple[str, ...]:
    """Returns the names in ``mask`` in bit order; unknown bits come out as ``bit<N>``."""
    top = mask.bit_length()
    return tuple(NAMES[bit] if bit < len(NAMES) else f"bit{bit}" for bit in range(top) if mask >> bit & 1)
