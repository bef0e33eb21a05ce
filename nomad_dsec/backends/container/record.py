"""What a container's handle says: every resource by name, enough to find, adopt, kill and remove all of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from libdsec.errors import PlatformError

from nomad_dsec.model import HANDLE_VERSION, Handle

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nomad_dsec.model import SandboxSpec

BACKEND: Final = "container"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """boot_id: the machine's boot in which all this lives. cgroup, net, upper: records of nomad_dsec.linux.

    launcher: name of the launcher that made it; socket: path of its listening socket on the host.
    """

    boot_id: str
    launcher: str
    digest: str
    uid_base: int
    socket: str
    cgroup: Mapping[str, Any]
    net: Mapping[str, Any]
    upper: Mapping[str, Any]

    def to_handle(self, sandbox: str, incarnation: int) -> Handle:
        """The handle to journal."""
        data = {
            "boot_id": self.boot_id,
            "launcher": self.launcher,
            "digest": self.digest,
            "uid_base": self.uid_base,
            "socket": self.socket,
            "cgroup": dict(self.cgroup),
            "net": dict(self.net),
            "upper": dict(self.upper),
        }
        return Handle(version=HANDLE_VERSION, backend=BACKEND, sandbox=sandbox, incarnation=incarnation, data=data)


def read_record(handle: Handle) -> Record:
    """The record of a handle of ours. PlatformError bad_handle when it is another backend's, or too new."""
    if handle.backend != BACKEND or handle.version > HANDLE_VERSION:
        raise PlatformError(
            "bad_handle",
            f"handle of {handle.sandbox} is version {handle.version} of backend {handle.backend}",
            hint="run the node daemon that wrote it, or a newer one",
        )
    data = handle.data
    try:
        return Record(
            boot_id=str(data["boot_id"]),
            launcher=str(data["launcher"]),
            digest=str(data["digest"]),
            uid_base=int(data["uid_base"]),
            socket=str(data["socket"]),
            cgroup=dict(data["cgroup"]),
            net=dict(data["net"]),
            upper=dict(data["upper"]),
        )
    except (KeyError, TypeError, ValueError) as broken:
        raise PlatformError("bad_handle", f"handle of {handle.sandbox} lacks {broken}") from broken


def owner_label(handle: Handle) -> str:
    """What a cgroup in use is labelled with: it tells an owner from the next one of a cgroup that is used again."""
    return f"{handle.sandbox}#{handle.incarnation}"


def owner_of_spec(spec: SandboxSpec) -> str:
    """The same, before there is a handle."""
    return f"{spec.id}#{spec.incarnation}"
