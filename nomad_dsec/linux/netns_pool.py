"""Pools of ready network namespaces: `none` (only lo) and `open` (a routed link behind NAT, special addresses refused).

Idle namespaces are held by nothing but our fds, so they vanish with the daemon and nothing has to be swept for them; a
namespace in use is held by the sandbox's own processes and outlives us. Nothing is pinned in the file system: each pin
would be a mount that every later sandbox's mount namespace has to copy.
Measured on 6.18, 2 cores: making a namespace costs 0.5 ms, its removal by a kworker up to 0.4 ms, asking whether it is
untouched 0.05 ms; so a `none` namespace in which nothing was ever sent is used again, and any other is let go.
An `open` namespace has one owner in its life, and its address comes round only after all others (case L10).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import os
import secrets
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from libdsec.errors import CapacityError, PlatformError, UsageError

from nomad_dsec.linux import netns, nft_table
from nomad_dsec.linux.syscalls import SyscallError
from nomad_dsec.linux.veth import Links
from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

NetKind = Literal["none", "open"]
_T = TypeVar("_T")
_IP_FORWARD: Final = Path("/proc/sys/net/ipv4/ip_forward")
_TRIES: Final = 64
_log = get_log("linux.netns")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetSlot:
    """A network namespace for one sandbox. fd: -1 once it is the sandbox's alone (recovered from a handle).

    link, address, gateway: the host's end and the two addresses of an `open` one, else "".
    """

    kind: NetKind
    fd: int
    link: str = ""
    address: str = ""
    gateway: str = ""

    def to_record(self) -> dict[str, Any]:
        """What a handle keeps; NetnsPool.adopt takes it."""
        return {"kind": self.kind, "link": self.link, "address": self.address, "gateway": self.gateway}


class Addresses:
    """Pairs of neighbouring addresses (gateway even, sandbox odd) of a subnet, round and round. Pure."""

    def __init__(self, subnet: str, *, first: int) -> None:
        self._net = ipaddress.IPv4Network(subnet)
        self._pairs = self._net.num_addresses // 2
        self._next = first % self._pairs
        self._used: set[int] = set()

    def take(self) -> tuple[int, str, str]:
        """(number, gateway, address) of the pair that was free longest. CapacityError net_addresses when none is."""
        for _ in range(self._pairs):
            number, self._next = self._next, (self._next + 1) % self._pairs
            if number not in self._used:
                self._used.add(number)
                return number, str(self._net[2 * number]), str(self._net[2 * number + 1])
        raise CapacityError("net_addresses", f"all {self._pairs} address pairs of {self._net} are in use")

    def claim(self, address: str) -> None:
        """Mark a recovered sandbox's pair as used."""
        self._used.add(self._number(address))

    def release(self, address: str) -> None:
        """Give a pair back; the round-robin makes it wait for all others."""
        self._used.discard(self._number(address))

    def _number(self, address: str) -> int:
        offset = int(ipaddress.IPv4Address(address)) - int(self._net.network_address)
        return offset // 2 if 0 <= offset < self._net.num_addresses else -1


class NetnsPool:
    """`await start()`, keep `run()` in a TaskGroup, then take and give_back. All namespace work is on one thread."""

    def __init__(
        self,
        node: str,
        *,
        closed_size: int = 32,
        open_size: int = 0,
        subnet: str = nft_table.SANDBOX_SUBNET,
        resolvers: Sequence[str] = (),
        first_pair: int | None = None,
    ) -> None:
        """first_pair: which pair of the subnet's addresses comes first; by default any, so that nodes seldom meet."""
        self._node = node
        self._prefix = nft_table.link_prefix(node)
        self._script = nft_table.render_table(node, subnet=subnet, resolvers=resolvers)
        self._sizes: dict[NetKind, int] = {"none": closed_size, "open": open_size}
        self._idle: dict[NetKind, list[NetSlot]] = {"none": [], "open": []}
        self._addresses = Addresses(subnet, first=secrets.randbelow(1 << 20) if first_pair is None else first_pair)
        self._low = asyncio.Event()
        self._open_ready = False
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="netns")
        self._links: Links | None = None

    async def start(self) -> None:
        """Make sure that `open` sandboxes are fenced before the first one, if the pool is to hold any."""
        if self._sizes["open"]:
            await self.prepare_open()
        self._low.set()

    async def prepare_open(self) -> None:
        """Load the node's nft table and turn forwarding on. Idempotent; PlatformError says what this host lacks."""
        if self._open_ready:
            return
        await nft_table.apply_table(self._script)
        try:
            if _IP_FORWARD.read_text(encoding="ascii").strip() != "1":
                _IP_FORWARD.write_text("1", encoding="ascii")
                _log.info("turned on IPv4 forwarding for sandboxes with an open network", node=self._node)
        except OSError as error:
            raise PlatformError(
                "no_forwarding", f"can't set {_IP_FORWARD}: {error.strerror}", hint="run as root"
            ) from error
        self._open_ready = True

    async def run(self) -> None:
        """Keep the pool filled until cancelled. A failure is logged and tried again after a second."""
        while True:
            await self._low.wait()
            self._low.clear()
            try:
                await self.fill()
            except (SyscallError, PlatformError, CapacityError, OSError) as error:
                _log.warning("could not fill the pool of network namespaces", node=self._node, error=str(error))
                await asyncio.sleep(1)
                self._low.set()

    async def fill(self) -> None:
        """Make namespaces until both kinds are at their size, and let go of those that a storm of cancels left over."""
        for kind in ("none", "open"):
            while len(self._idle[kind]) < self._sizes[kind]:
                self._idle[kind].append(await self._make(kind))
            while len(self._idle[kind]) > max(self._sizes[kind], 1):
                await self._let_go(self._idle[kind].pop())

    def idle(self, kind: NetKind) -> int:
        """Namespaces ready to be taken."""
        return len(self._idle[kind])

    async def take(self, kind: NetKind) -> NetSlot:
        """One that nobody has or had a conversation in. From the pool, or made on the spot when it is empty.

        The launcher enters `slot.fd` (setns(2)); the pool keeps owning the fd until give_back or let_go.
        """
        if kind not in self._sizes:
            raise UsageError("bad_network", f"no network kind {kind!r}", field="policy.network", hint="none or open")
        slot = self._idle[kind].pop() if self._idle[kind] else await self._make(kind)
        if len(self._idle[kind]) * 2 <= self._sizes[kind]:
            self._low.set()
        return slot

    def adopt(self, record: Mapping[str, Any]) -> NetSlot:
        """The slot of a recovered sandbox (to_record): its address is taken; its own processes hold the namespace."""
        slot = NetSlot(
            kind="open" if record["kind"] == "open" else "none",
            fd=-1,
            link=str(record.get("link", "")),
            address=str(record.get("address", "")),
            gateway=str(record.get("gateway", "")),
        )
        if slot.address:
            self._addresses.claim(slot.address)
        return slot

    async def give_back(self, slot: NetSlot) -> None:
        """When every process of its owner is dead: reuse it if it is untouched, else let it go."""
        if slot.kind == "none" and slot.fd >= 0:
            await self._on_worker(self._reuse_or_close, slot)
            if len(self._idle["none"]) > max(self._sizes["none"], 1):
                self._low.set()  # fill() made one more between the worker's look and its append
        else:
            await self._let_go(slot)

    def _reuse_or_close(self, slot: NetSlot) -> None:
        if len(self._idle["none"]) < max(self._sizes["none"], 1) and _is_reusable(slot.fd):
            self._idle["none"].append(slot)
        else:
            os.close(slot.fd)

    async def _let_go(self, slot: NetSlot) -> None:
        # The link goes first and explicitly: the namespace itself is freed by a kworker some time later.
        if slot.link:
            await self._on_worker(self._delete_link, slot.link)
        if slot.fd >= 0:
            os.close(slot.fd)
        if slot.address:
            self._addresses.release(slot.address)

    async def sweep(self, keep_links: Collection[str]) -> list[str]:
        """Delete this node's host-side links that neither `keep_links` nor the pool has; returns their names."""
        kept = {slot.link for slot in self._idle["open"]} | set(keep_links)
        strays = [name for name in Links.names(self._prefix) if name not in kept]
        return [name for name in strays if await self._on_worker(self._delete_link, name)]

    async def close(self, *, forget_table: bool = False) -> None:
        """Drop the idle namespaces. The nft table stays for sandboxes that live on, unless forget_table."""
        for slots in self._idle.values():
            while slots:
                await self._let_go(slots.pop())
        if self._links is not None:
            await self._on_worker(self._links.close)
            self._links = None
        self._worker.shutdown()
        if forget_table:
            await nft_table.remove_table(self._node)
            self._open_ready = False

    async def _make(self, kind: NetKind) -> NetSlot:
        if kind == "none":
            return await self._on_worker(_make_closed)
        await self.prepare_open()
        return await self._on_worker(self._make_open)

    def _make_open(self) -> NetSlot:
        links = self._open_links()
        fd = netns.make_routed()
        try:
            for _ in range(_TRIES):
                number, gateway, address = self._addresses.take()
                link = f"{self._prefix}{number:x}"
                try:
                    if not _is_local(gateway):  # another node on this machine may use the same subnet
                        links.make_pair(link, fd, gateway=gateway)
                        netns.configure_link(fd, address=address, gateway=gateway)
                        return NetSlot(kind="open", fd=fd, link=link, address=address, gateway=gateway)
                except SyscallError as error:
                    if error.errno != errno.EEXIST:
                        links.delete(link)
                        self._addresses.release(address)
                        raise
            raise CapacityError("net_addresses", f"{_TRIES} address pairs in a row were in use on this host")
        except BaseException:
            os.close(fd)
            raise

    def _delete_link(self, name: str) -> bool:
        return self._open_links().delete(name)

    def _open_links(self) -> Links:
        if self._links is None:
            self._links = Links()
        return self._links

    async def _on_worker(self, act: Callable[..., _T], *args: Any) -> _T:
        """Run on the one thread that changes namespaces."""
        future = self._worker.submit(act, *args)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(functools.partial(self._keep_result, asyncio.get_running_loop()))
            raise

    def _keep_result(self, loop: asyncio.AbstractEventLoop, future: Future[_T]) -> None:
        """A namespace whose taker was cancelled while it was being made is the pool's; fill() drops what is too many.

        Called on either thread, perhaps after the loop has ended.
        """
        if not future.cancelled() and future.exception() is None:
            slot = future.result()
            if isinstance(slot, NetSlot):
                self._idle[slot.kind].append(slot)
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._low.set)


def _make_closed() -> NetSlot:
    return NetSlot(kind="none", fd=netns.make_closed())


def _is_reusable(fd: int) -> bool:
    try:
        return netns.is_untouched(fd)
    except (OSError, ValueError):
        return False


def _is_local(address: str) -> bool:
    probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        probe.bind((address, 0))
    except OSError:
        return False
    else:
        return True
    finally:
        probe.close()
