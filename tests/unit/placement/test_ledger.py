"""Reservations: held until a report can show them, never counted twice, back to zero when all is done."""

from hypothesis import given
from hypothesis import strategies as st

from nomad_dsec.placement.ledger import ARRIVAL_S, Ledger
from nomad_dsec.placement.view import Demand

ONE = Demand(backend="container", cpus=0.1, memory_mib=100, disk_mib=10)


def held(ledger: Ledger) -> tuple[int, int]:
    return ledger.unseen("n").sandboxes, ledger.in_flight("n")


def test_room_is_held_until_a_report_taken_after_the_reply():
    ledger = Ledger()
    one = ledger.reserve("n", ONE, 3, now=10.0)
    assert held(ledger) == (3, 3)
    ledger.report("n", as_of=10.1)  # may have been answered before the create arrived
    assert held(ledger) == (3, 3)
    ledger.settle(one, now=10.2)
    ledger.report("n", as_of=10.15)
    assert held(ledger) == (3, 0)
    ledger.report("n", as_of=10.2)
    assert held(ledger) == (0, 0)


def test_a_slow_start_is_not_counted_twice():
    ledger = Ledger()
    one = ledger.reserve("n", ONE, 3, now=10.0)
    ledger.report("n", as_of=10.0 + ARRIVAL_S)
    assert held(ledger) == (0, 3)  # the node counts them now; they still weigh as starts
    ledger.settle(one, now=11.0)
    assert held(ledger) == (0, 0)


def test_a_refused_create_gives_its_room_back_once():
    ledger = Ledger()
    one, two = ledger.reserve("n", ONE, 2, now=0.0), ledger.reserve("n", ONE, 1, now=0.0)
    ledger.release(one)
    ledger.release(one)
    assert held(ledger) == (1, 1)
    ledger.release(two)
    assert ledger.unseen("n").cpus == 0.0


ops = st.lists(
    st.tuples(st.sampled_from(["reserve", "settle", "release", "report"]), st.integers(0, 7), st.floats(0, 0.4)),
    max_size=60,
)


@given(ops)
def test_counts_never_go_negative_and_drain_to_zero(steps):
    ledger, made, now = Ledger(), [], 0.0
    for name, index, passed in steps:
        now += passed
        if name == "reserve":
            made.append(ledger.reserve("n", ONE, index + 1, now=now))
        elif name == "report":
            ledger.report("n", as_of=now - passed / 2)
        elif made:
            one = made[index % len(made)]
            ledger.settle(one, now=now) if name == "settle" else ledger.release(one)
        unseen = ledger.unseen("n")
        assert unseen.sandboxes >= 0
        assert ledger.in_flight("n") >= 0
        assert unseen.memory_mib == unseen.sandboxes * 100
    for one in made:
        ledger.settle(one, now=now)
    ledger.report("n", as_of=now + 1)
    assert held(ledger) == (0, 0)
    assert ledger.unseen("n").cpus == 0.0
