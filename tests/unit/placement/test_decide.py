"""Placement as a whole: shares never exceed room, refusals count every node, retried creates avoid who refused."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nomad_dsec.placement import feasible
from nomad_dsec.placement.decide import no_room, place
from nomad_dsec.placement.ledger import Ledger
from nomad_dsec.placement.view import Demand, NodeView, Offer

OFFERS = {"container": Offer()}


def node(name: str, **fields) -> NodeView:
    base = {
        "cpus_total": 8.0,
        "memory_mib_total": 8192,
        "sandboxes_max": 100,
        "starting_max": 8,
        "disk_mib_free": 100_000,
        "offers": OFFERS,
        "images": frozenset({"sha256:a"}),
    }
    return NodeView(node=name, **(base | fields))


def demand(**fields) -> Demand:
    base = {"backend": "container", "cpus": 1.0, "memory_mib": 512, "disk_mib": 1024, "digest": "sha256:a"}
    return Demand(**(base | fields))


def decide(nodes, want=None, count=1, **more):
    return place(nodes, want or demand(), count, ledger=more.pop("ledger", Ledger()), rng=random.Random(7), **more)


REFUSALS = [
    ({"stale": True}, {}, feasible.STALE),
    ({"draining": True}, {}, feasible.DRAINING),
    ({"offers": {}}, {}, feasible.BACKEND),
    ({"offers": {"container": Offer(available=False, reason="no cgroups")}}, {}, feasible.BACKEND),
    (
        {"offers": {"container": Offer(features=frozenset({"pause"}))}},
        {"features": frozenset({"fork"})},
        feasible.FEATURE,
    ),
    ({"offers": {"container": Offer(qos=frozenset({"best_effort"}))}}, {}, feasible.QOS),
    ({"images": frozenset()}, {}, feasible.IMAGE),
    ({}, {"cpus": 8.5}, feasible.TOO_LARGE),
    ({}, {"memory_mib": 8193}, feasible.TOO_LARGE),
    ({"cpus_used": 7.5}, {}, feasible.CPUS),
    ({"memory_mib_used": 8000}, {}, feasible.MEMORY),
    ({"disk_mib_free": 1000}, {}, feasible.DISK),
    ({"sandboxes": 100}, {}, feasible.SANDBOXES),
]


@pytest.mark.parametrize(("state", "want", "reason"), REFUSALS, ids=[f"{row[2]}{i}" for i, row in enumerate(REFUSALS)])
def test_each_refusal_is_named_and_its_opposite_is_placed(state, want, reason):
    refused = decide([node("n1", **state)], demand(**want))
    assert (dict(refused.shares), refused.refusals) == ({}, {reason: 1})
    assert decide(
        [
            node("n1", **state),
            node(
                "n2", offers={"container": Offer(features=frozenset({"fork"}))}, cpus_total=64.0, memory_mib_total=65536
            ),
        ],
        demand(**want),
    ).shares == {"n2": 1}


def test_refusals_count_nodes_per_reason():
    nodes = [node("a", draining=True), node("b", draining=True), node("c", stale=True), node("d", cpus_used=8.0)]
    decision = decide(nodes, count=3)
    assert decision.refusals == {"draining": 2, "stale": 1, "cpus": 1}
    assert decision.unplaced == 3
    error = no_room(demand(), wanted=3, unplaced=3, refusals=decision.refusals)
    assert error.details["refusals"] == {"draining": 2, "stale": 1, "cpus": 1}
    assert error.retry_after_s is not None
    assert "2 draining" in error.message


@pytest.mark.parametrize(
    ("refusals", "code", "retries"),
    [
        ({}, "no_nodes", True),
        ({"stale": 2}, "no_nodes", True),
        ({"stale": 1, "draining": 1}, "draining", True),
        ({"image_missing": 2}, "image_missing", False),
        ({"backend_unavailable": 2, "image_missing": 1}, "backend_unavailable", False),
        ({"larger_than_node": 1}, "capacity", False),
        ({"image_missing": 5, "memory": 1}, "capacity", True),
        ({"queue_full": 1}, "capacity", True),
    ],
)
def test_the_error_says_whether_trying_again_can_help(refusals, code, retries):
    error = no_room(demand(), wanted=1, unplaced=1, refusals=refusals)
    assert (error.code, error.retry_after_s is not None) == (code, retries)


def test_a_node_that_refused_is_not_asked_again_and_its_reason_is_counted():
    decision = decide([node("a"), node("b", cpus_used=8.0)], excluded={"a": "starting_limit"})
    assert decision.shares == {}
    assert decision.refusals == {"starting_limit": 1, "cpus": 1}


def test_the_emptier_node_by_the_scarcer_resource_wins():
    nodes = [node("cpu-full", cpus_used=6.0), node("mem-full", memory_mib_used=7000), node("empty", cpus_used=1.0)]
    assert decide(nodes).shares == {"empty": 1}


def test_in_flight_starts_push_work_elsewhere():
    ledger = Ledger()
    ledger.reserve("a", demand(cpus=0.01, memory_mib=16), 8, now=0.0)
    assert decide([node("a"), node("b", cpus_used=2.0)], ledger=ledger).shares == {"b": 1}


def test_a_warm_node_beats_a_cold_lazy_one_until_it_is_much_fuller():
    lazy = {"container": Offer(features=frozenset({"lazy_images"}))}
    cold = node("cold", images=frozenset(), offers=lazy)
    assert decide([node("warm", cpus_used=1.0, offers=lazy), cold]).shares == {"warm": 1}
    assert decide([node("warm", cpus_used=6.0, offers=lazy), cold]).shares == {"cold": 1}


def test_a_group_is_spread_evenly_over_equal_nodes():
    decision = decide([node(name, cpus_total=64.0) for name in "abcd"], demand(cpus=0.1, memory_mib=16), count=40)
    assert decision.shares == dict.fromkeys("abcd", 10)


def test_a_large_cluster_is_sampled_yet_a_single_fitting_node_is_found():
    nodes = [node(f"n{i}", cpus_used=8.0) for i in range(200)] + [node("free")]
    assert decide(nodes).shares == {"free": 1}
    looks = []

    class Counting(Ledger):
        def unseen(self, name):
            looks.append(name)
            return super().unseen(name)

    decide([node(f"n{i}") for i in range(200)], ledger=Counting(), sample=8)
    assert len(looks) == 8


views = st.builds(
    node,
    st.just("x"),
    cpus_total=st.floats(0, 32),
    cpus_used=st.floats(0, 32),
    memory_mib_total=st.integers(0, 16384),
    memory_mib_used=st.integers(0, 16384),
    sandboxes=st.integers(0, 20),
    sandboxes_max=st.integers(0, 20),
    disk_mib_free=st.integers(0, 4096),
    draining=st.booleans(),
    stale=st.booleans(),
    images=st.sampled_from([frozenset(), frozenset({"sha256:a"})]),
    offers=st.sampled_from([OFFERS, {}, {"container": Offer(qos=frozenset({"best_effort"}))}]),
)


@given(
    fields=st.lists(views, max_size=12),
    count=st.integers(1, 400),
    cpus=st.floats(0.01, 8),
    memory=st.integers(16, 8192),
    seed=st.integers(0, 9),
    held=st.lists(st.tuples(st.integers(0, 11), st.integers(1, 5)), max_size=6),
)
def test_shares_fit_and_every_node_is_accounted_for(fields, count, cpus, memory, seed, held):
    nodes = [
        NodeView(**({slot: getattr(v, slot) for slot in NodeView.__slots__} | {"node": f"n{i}"}))
        for i, v in enumerate(fields)
    ]
    want, ledger = demand(cpus=cpus, memory_mib=memory), Ledger()
    for index, number in held:
        ledger.reserve(f"n{index}", want, number, now=0.0)
    decision = place(nodes, want, count, ledger=ledger, rng=random.Random(seed))
    by_name = {view.node: view for view in nodes}
    assert sum(decision.shares.values()) + decision.unplaced == count
    for name, share in decision.shares.items():
        view = by_name[name]
        assert feasible.mismatch(view, want) == ""
        assert 1 <= share <= feasible.room(view, want, ledger.unseen(name))[0]
    if decision.unplaced:
        assert sum(decision.refusals.values()) == len(nodes)
        assert all(
            decision.shares.get(view.node, 0) == feasible.room(view, want, ledger.unseen(view.node))[0]
            for view in nodes
            if not feasible.mismatch(view, want)
        )
