"""What a host was seen to be able to do: the record that ``probe`` fills and the compiler reads. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

ABILITIES: dict[str, str] = {
    "seccomp_filter": "seccomp filters",
    "user_namespaces": "user namespaces",
    "pid_namespaces": "pid namespaces",
    "net_namespaces": "network namespaces",
    "landlock": "Landlock; the value is its ABI",
    "landlock_scopes": "Landlock scopes for abstract sockets and signals (ABI 6, Linux 6.12)",
    "idmapped_mounts": "idmapped mounts (Linux 5.12)",
    "overlay_in_userns": "overlayfs mounted inside a user namespace (Linux 5.11)",
    "openat2": "openat2 with RESOLVE_IN_ROOT (Linux 5.6)",
    "cgroup_v1_freezer": "freezer of cgroup v1",
    "cgroup_v2_freezer": "cgroup.freeze of cgroup v2",
    "cgroup_kill": "cgroup.kill (Linux 5.14)",
    "cgroup_v1_devices": "device rules of cgroup v1",
    "cgroup_bpf": "BPF programs attached to a cgroup",
    "nftables": "nftables",
    "veth": "veth pairs",
    "fanotify_permission": "fanotify permission events",
    "apparmor": "AppArmor",
    "bpf_lsm": "BPF LSM programs",
    "xfs_quota": "XFS project quota",
    "ext4_quota": "ext4 project quota",
    "tmpfs_quota": "tmpfs quota",
    "btrfs_qgroups": "btrfs qgroups",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ability:
    """One answer: ``detail`` says what was seen, or why it failed; ``value`` is a version where there is one."""

    ok: bool
    detail: str = ""
    value: int = 0


NOT_PROBED = Ability(ok=False, detail="not probed")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAbilities:
    """All answers of one host, hashable so that compiled policies can be kept by (policy, host)."""

    arch: str
    kernel: str
    items: tuple[tuple[str, Ability], ...]

    def get(self, name: str) -> Ability:
        """Returns one answer; a name outside ``ABILITIES`` is a bug and raises KeyError."""
        if name not in ABILITIES:
            raise KeyError(name)
        return dict(self.items).get(name, NOT_PROBED)

    def has(self, name: str) -> bool:
        """Tells whether the host can do ``name``."""
        return self.get(name).ok

    def to_json(self) -> dict[str, Any]:
        """Returns plain data: ``{arch, kernel, abilities: {name: {ok, detail, value}}}``."""
        rows = {name: {"ok": item.ok, "detail": item.detail, "value": item.value} for name, item in self.items}
        return {"arch": self.arch, "kernel": self.kernel, "abilities": rows}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HostAbilities:
        """Reads what ``to_json`` gave; abilities that this version doesn't know are dropped."""
        items = tuple(
            (name, Ability(ok=bool(row["ok"]), detail=str(row["detail"]), value=int(row["value"])))
            for name, row in data["abilities"].items()
            if name in ABILITIES
        )
        return cls(arch=str(data["arch"]), kernel=str(data["kernel"]), items=items)

    @classmethod
    def assumed(cls, *, arch: str = "x86_64", without: tuple[str, ...] = (), landlock_abi: int = 7) -> HostAbilities:
        """Returns a host that can do everything except ``without``: for planning and for tests, never for a start."""
        for name in without:
            if name not in ABILITIES:
                raise KeyError(name)
        items = tuple(
            (
                name,
                Ability(
                    ok=name not in without,
                    detail="assumed",
                    value=landlock_abi if name == "landlock" and name not in without else 0,
                ),
            )
            for name in ABILITIES
        )
        return cls(arch=arch, kernel="assumed", items=items)
