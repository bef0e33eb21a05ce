"""Network namespaces made ahead of time: what is done inside one, by the calling thread, without any netlink.

The namespaces belong to the host's user namespace, so a sandbox's root has no CAP_NET_ADMIN over them: it can change no
address, route, sysctl or filter. Sysctls therefore give back what programs expect of root: low ports and ping.
See network_namespaces(7), netdevice(7), rt-sysctls in ip-sysctl.rst.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nomad_dsec.linux.syscalls import CLONE_NEWNET, SyscallError, setns, unshare

if TYPE_CHECKING:
    from collections.abc import Iterator

# linux/sockios.h, linux/if.h, linux/route.h
_SIOCADDRT: Final = 0x890B
_SIOCGIFFLAGS: Final = 0x8913
_SIOCSIFFLAGS: Final = 0x8914
_SIOCSIFADDR: Final = 0x8916
_SIOCSIFNETMASK: Final = 0x891C
_SIOCSIFBRDADDR: Final = 0x891A
_IFF_UP: Final = 0x1
_RTF_UP: Final = 0x1
_RTF_GATEWAY: Final = 0x2
_IFREQ_SIZE: Final = 40
_SLASH31: Final = "255.255.255.254"

SANDBOX_LINK: Final = "eth0"
_SYSCTLS_ALL: Final = (
    ("net/ipv4/ip_unprivileged_port_start", "0"),
    ("net/ipv4/ping_group_range", "0 2147483647"),
)
_SYSCTLS_OPEN: Final = (
    ("net/ipv6/conf/default/disable_ipv6", "1"),
    ("net/ipv6/conf/all/disable_ipv6", "1"),
)


@contextmanager
def own_netns() -> Iterator[int]:
    """Run the block in a fresh network namespace; yields an fd of it, which the caller owns. Only this thread moves."""
    with _home() as home:
        unshare(CLONE_NEWNET)
        try:
            fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                yield fd
            except BaseException:
                os.close(fd)
                raise
        finally:
            setns(home, CLONE_NEWNET)


@contextmanager
def inside(netns_fd: int) -> Iterator[None]:
    """Run the block in that namespace. Only this thread moves."""
    with _home() as home:
        setns(netns_fd, CLONE_NEWNET)
        try:
            yield
        finally:
            setns(home, CLONE_NEWNET)


@contextmanager
def _home() -> Iterator[int]:
    fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def make_closed() -> int:
    """An fd of a namespace that has `lo`, up, and nothing else. SyscallError says what failed."""
    with own_netns() as fd:
        _write_sysctls(_SYSCTLS_ALL)
        link_up("lo")
        return fd


def make_routed() -> int:
    """The same, IPv6 off, ready for a link from outside (configure_link)."""
    with own_netns() as fd:
        _write_sysctls(_SYSCTLS_ALL)
        _write_sysctls(_SYSCTLS_OPEN)
        link_up("lo")
        return fd


def configure_link(netns_fd: int, *, address: str, gateway: str) -> None:
    """Inside: `eth0` gets `address`/31 and the default route by `gateway`, its only neighbour."""
    with inside(netns_fd):
        set_address(SANDBOX_LINK, address)
        _default_route(gateway)


def is_untouched(netns_fd: int) -> bool:
    """True when no socket is left in the namespace and no packet ever crossed its `lo`.

    Its owner had no right to change anything else in it, so such a namespace is as good as new: without a packet there
    is no TIME_WAIT, no orphan, no metric and no conversation that a next owner could meet. Ask once the owner is dead.
    """
    with inside(netns_fd):
        used = _first_number(Path("/proc/thread-self/net/sockstat").read_text(encoding="ascii"), "sockets: used")
        links = Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines()[2:]
    return used == 0 and len(links) == 1 and _packets(links[0]) == 0


def _first_number(text: str, label: str) -> int:
    for line in text.splitlines():
        if line.startswith(label):
            return int(line.removeprefix(label).split()[0])
    raise ValueError(f"no {label!r} in {text!r}")


def _packets(line: str) -> int:
    columns = line.rpartition(":")[2].split()
    return int(columns[1]) + int(columns[9])


def link_up(name: str) -> None:
    """Set IFF_UP on a link of the current namespace."""
    with _control_socket() as control:
        request = _ioctl(control, _SIOCGIFFLAGS, _ifreq(name), "SIOCGIFFLAGS", name)
        (flags,) = struct.unpack_from("<H", request, 16)
        _ioctl(control, _SIOCSIFFLAGS, _ifreq(name, struct.pack("<H", flags | _IFF_UP)), "SIOCSIFFLAGS", name)


def set_address(name: str, address: str) -> None:
    """Give a link of the current namespace its IPv4 `address`/31 and set it up."""
    with _control_socket() as control:
        _ioctl(control, _SIOCSIFADDR, _ifreq(name, _sockaddr(address)), "SIOCSIFADDR", name)
        _ioctl(control, _SIOCSIFNETMASK, _ifreq(name, _sockaddr(_SLASH31)), "SIOCSIFNETMASK", name)
        # SIOCSIFADDR supposed a /24 and its broadcast address, which is the neighbour's own when that ends in .255.
        _ioctl(control, _SIOCSIFBRDADDR, _ifreq(name, _sockaddr("0.0.0.0")), "SIOCSIFBRDADDR", name)  # noqa: S104
    link_up(name)


def _default_route(gateway: str) -> None:
    # struct rtentry on 64 bits: pad1, dst, gateway, genmask, flags, pads, dev and metrics left zero.
    zero = _sockaddr("0.0.0.0")  # noqa: S104 - the default route's destination
    entry = struct.pack("<Q16s16s16sH", 0, zero, _sockaddr(gateway), zero, _RTF_UP | _RTF_GATEWAY).ljust(120, b"\0")
    with _control_socket() as control:
        _ioctl(control, _SIOCADDRT, entry, "SIOCADDRT", gateway)


@contextmanager
def _control_socket() -> Iterator[socket.socket]:
    control = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        yield control
    finally:
        control.close()


def _ioctl(control: socket.socket, request: int, argument: bytes, name: str, subject: str) -> bytes:
    try:
        return fcntl.ioctl(control.fileno(), request, argument)
    except OSError as error:
        raise SyscallError(error.errno or 0, name, subject) from error


def _ifreq(name: str, payload: bytes = b"") -> bytes:
    return (name.encode("ascii").ljust(16, b"\0") + payload).ljust(_IFREQ_SIZE, b"\0")


def _sockaddr(address: str) -> bytes:
    return struct.pack("<HH4s8s", socket.AF_INET, 0, socket.inet_aton(address), b"")


def _write_sysctls(values: tuple[tuple[str, str], ...]) -> None:
    for name, value in values:
        path = Path("/proc/sys", name)
        try:
            path.write_text(value, encoding="ascii")
        except FileNotFoundError:
            continue  # a kernel without IPv6
        except OSError as error:
            raise SyscallError(error.errno or 0, f"write {value!r}", str(path)) from error
