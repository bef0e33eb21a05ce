"""The compiled policy: everything that a launcher needs, as data that can be stored and printed. Pure."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsec_policies.capabilities import mask_of, names_of
from dsec_policies.landlock import Ruleset
from dsec_policies.model import Policy, parse_policy
from dsec_policies.profiles import Device

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Enforced:
    """A clause of the effective policy with the layers that hold it, strongest first."""

    clause: str
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unenforced:
    """A clause that nothing here holds, which the caller allowed; ``reason`` is what the host lacks."""

    clause: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPolicy:
    """A policy as this host enforces it.

    ``seccomp``: array of struct sock_filter (8 bytes each), the only filter of the sandbox, installed on PID 1 last.
    ``capabilities``/``init_capabilities``: masks for execs and for PID 1 (bounding, permitted, effective; inheritable
    and ambient stay empty). ``masked_paths``, ``read_only_paths``: absolute, in mount order. ``protected_paths``: each
    becomes a read-only bind mount of itself, and each directory and symbolic link on the way a bind mount of itself,
    so that it can't be renamed or replaced. ``rlimits``: (name without RLIMIT_, soft, hard). ``sysctls``: (name, value)
    written inside the user namespace. ``network``: ``none`` or ``open``. ``no_new_privs``: set on PID 1.
    """

    policy: Policy
    arch: str
    seccomp: bytes
    capabilities: int
    init_capabilities: int
    no_new_privs: bool
    masked_paths: tuple[str, ...]
    read_only_paths: tuple[str, ...]
    protected_paths: tuple[str, ...]
    devices: tuple[Device, ...]
    rlimits: tuple[tuple[str, int, int], ...]
    sysctls: tuple[tuple[str, str], ...]
    landlock: Ruleset
    network: str
    enforced: tuple[Enforced, ...]
    unenforced: tuple[Unenforced, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns plain data; the filter is base64 text, capability masks are lists of names."""
        return {
            "policy": self.policy.to_json(),
            "arch": self.arch,
            "seccomp": base64.b64encode(self.seccomp).decode("ascii"),
            "capabilities": list(names_of(self.capabilities)),
            "init_capabilities": list(names_of(self.init_capabilities)),
            "no_new_privs": self.no_new_privs,
            "masked_paths": list(self.masked_paths),
            "read_only_paths": list(self.read_only_paths),
            "protected_paths": list(self.protected_paths),
            "devices": [{"name": item.name, "major": item.major, "minor": item.minor} for item in self.devices],
            "rlimits": [list(item) for item in self.rlimits],
            "sysctls": [list(item) for item in self.sysctls],
            "landlock": {
                "handled_fs": self.landlock.handled_fs,
                "handled_net": self.landlock.handled_net,
                "scoped": self.landlock.scoped,
            },
            "network": self.network,
            "enforced": [{"clause": item.clause, "layers": list(item.layers)} for item in self.enforced],
            "unenforced": [{"clause": item.clause, "reason": item.reason} for item in self.unenforced],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CompiledPolicy:
        """Reads what ``to_json`` gave, for a handle that is recovered."""
        return cls(
            policy=parse_policy(data["policy"]),
            arch=data["arch"],
            seccomp=base64.b64decode(data["seccomp"]),
            capabilities=mask_of(data["capabilities"]),
            init_capabilities=mask_of(data["init_capabilities"]),
            no_new_privs=data["no_new_privs"],
            masked_paths=tuple(data["masked_paths"]),
            read_only_paths=tuple(data["read_only_paths"]),
            protected_paths=tuple(data["protected_paths"]),
            devices=tuple(Device(**item) for item in data["devices"]),
            rlimits=tuple((name, soft, hard) for name, soft, hard in data["rlimits"]),
            sysctls=tuple((name, value) for name, value in data["sysctls"]),
            landlock=Ruleset(**data["landlock"]),
            network=data["network"],
            enforced=tuple(Enforced(clause=i["clause"], layers=tuple(i["layers"])) for i in data["enforced"]),
            unenforced=tuple(Unenforced(clause=i["clause"], reason=i["reason"]) for i in data["unenforced"]),
        )

    @property
    def digest(self) -> str:
        """Returns a digest of everything above: sandboxes with the same digest are under the same policy."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()
