"""Host-side links of open sandboxes: made, listed and deleted by rtnetlink (pyroute2)."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from typing import Final

from pyroute2 import IPRoute, NetlinkError

from nomad_dsec.linux.netns import SANDBOX_LINK, set_address
from nomad_dsec.linux.syscalls import SyscallError

_HOST_SYSCTLS: Final = (("ipv6", "disable_ipv6", "1"), ("ipv4", "rp_filter", "1"))


class Links:
    """An rtnetlink socket of the caller's namespace, for one thread that runs no event loop (pyroute2 brings one)."""

    def __init__(self) -> None:
        self._route = IPRoute()

    def close(self) -> None:
        """Close the socket."""
        self._route.close()

    def make_pair(self, name: str, netns_fd: int, *, gateway: str) -> None:
        """A veth pair: `name` here with `gateway`/31, its peer as eth0 in the namespace. Nothing stays on failure.

        SyscallError EEXIST: the name is in use.
        """
        peer = {"ifname": SANDBOX_LINK, "net_ns_fd": netns_fd}
        try:
            self._route.link("add", ifname=name, kind="veth", peer=peer)
        except NetlinkError as error:
            raise SyscallError(error.code, "RTM_NEWLINK veth", name) from error
        try:
            for family, knob, value in _HOST_SYSCTLS:
                path = Path(f"/proc/sys/net/{family}/conf/{name}/{knob}")
                if path.exists():
                    path.write_text(value, encoding="ascii")
            set_address(name, gateway)
        except BaseException:
            self.delete(name)
            raise

    def delete(self, name: str) -> bool:
        """Delete a link and with it its peer; False when there was none."""
        try:
            self._route.link("del", ifname=name)
        except NetlinkError as error:
            if error.code == errno.ENODEV:
                return False
            raise SyscallError(error.code, "RTM_DELLINK", name) from error
        return True

    @staticmethod
    def names(prefix: str) -> list[str]:
        """Links of the caller's namespace whose name begins so."""
        return sorted(name for _, name in socket.if_nameindex() if name.startswith(prefix))
