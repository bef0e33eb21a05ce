"""Reservations: what this gateway has asked of nodes and their reports do not show yet. Pure: instants are passed in.

Two numbers per node. `unseen` is room promised to creates that the node's last report can't include; it is dropped once
a report was taken after the create reached the node, so that nothing is counted twice. `in_flight` counts starts that
have not been answered, exactly, and only serves ranking.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nomad_dsec.placement.view import Demand

ARRIVAL_S = 0.25  # a create is taken to have reached its node after this long


@dataclass(slots=True, eq=False)
class Reservation:
    """`count` sandboxes like `demand` on `node`, made at the monotonic instant `made_at`."""

    node: str
    demand: Demand
    count: int
    made_at: float
    settled_at: float | None = None
    seen: bool = False


@dataclass(slots=True)
class Unseen:
    """Room held by reservations that the node's report does not include."""

    cpus: float = 0.0
    memory_mib: int = 0
    sandboxes: int = 0


@dataclass(slots=True)
class _Account:
    unseen: Unseen = field(default_factory=Unseen)
    in_flight: int = 0
    open: set[Reservation] = field(default_factory=set)


_NOTHING = Unseen()


class Ledger:
    """All reservations of one gateway."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def unseen(self, node: str) -> Unseen:
        """Room promised beyond the node's report; not to be changed by the caller."""
        account = self._accounts.get(node)
        return account.unseen if account else _NOTHING

    def in_flight(self, node: str) -> int:
        """Starts asked of the node and not answered."""
        account = self._accounts.get(node)
        return account.in_flight if account else 0

    def reserve(self, node: str, demand: Demand, count: int, *, now: float) -> Reservation:
        """Hold room; the caller ends it by settle or release."""
        account = self._accounts.setdefault(node, _Account())
        reservation = Reservation(node, demand, count, now)
        account.open.add(reservation)
        account.in_flight += count
        self._hold(account, reservation, 1)
        return reservation

    def settle(self, reservation: Reservation, *, now: float) -> None:
        """The sandboxes run: the room stays held until a report shows them. Harmless when repeated."""
        account = self._accounts[reservation.node]
        if reservation.settled_at is not None or reservation not in account.open:
            return
        reservation.settled_at = now
        account.in_flight -= reservation.count
        if reservation.seen:
            account.open.discard(reservation)

    def release(self, reservation: Reservation) -> None:
        """The sandboxes were not made, or are gone. Harmless when repeated."""
        account = self._accounts[reservation.node]
        if reservation not in account.open:
            return
        account.open.discard(reservation)
        if reservation.settled_at is None:
            account.in_flight -= reservation.count
        if not reservation.seen:
            self._hold(account, reservation, -1)

    def report(self, node: str, *, as_of: float) -> None:
        """The node was asked for its use at the monotonic instant `as_of`: what it can include is no longer unseen."""
        account = self._accounts.get(node)
        if account is None:
            return
        for reservation in [one for one in account.open if not one.seen]:
            settled_at = reservation.settled_at
            if (settled_at is None or settled_at > as_of) and reservation.made_at + ARRIVAL_S > as_of:
                continue
            reservation.seen = True
            self._hold(account, reservation, -1)
            if settled_at is not None:
                account.open.discard(reservation)

    def forget(self, node: str) -> None:
        """The node is gone for good."""
        account = self._accounts.get(node)
        if account is not None and not account.open:
            del self._accounts[node]

    @staticmethod
    def _hold(account: _Account, reservation: Reservation, sign: int) -> None:
        demand, count, unseen = reservation.demand, reservation.count * sign, account.unseen
        unseen.sandboxes += count
        unseen.memory_mib += demand.memory_mib * count
        unseen.cpus = unseen.cpus + demand.cpus * count if unseen.sandboxes else 0.0  # no float dust when empty
