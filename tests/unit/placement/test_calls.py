"""Where calls go: only nodes that can take them, the least busy first, the same program to the same node."""

from __future__ import annotations

from nomad_dsec.placement.calls import rank_nodes
from nomad_dsec.placement.view import NodeView, Offer

CALLS = {"fncall": Offer()}


def _node(name: str, **more) -> NodeView:
    fields = {"cpus_total": 2.0, "memory_mib_total": 1024, "sandboxes_max": 10, "offers": CALLS, "images": {"d"}}
    return NodeView(node=name, **(fields | more))


def test_nodes_that_can_not_are_counted_by_reason():
    views = [
        _node("a", offers={}),
        _node("b", draining=True),
        _node("c", stale=True),
        _node("d", images=frozenset()),
        _node("e", offers={"fncall": Offer(available=False)}),
        _node("f"),
    ]
    nodes, refusals = rank_nodes(views, digest="d", in_flight={}, program=b"")
    assert nodes == ["f"]
    assert refusals == {"backend_unavailable": 2, "draining": 1, "stale": 1, "image_missing": 1}


def test_the_less_busy_comes_first_relative_to_its_cores():
    views = [_node("small", cpus_total=2.0), _node("large", cpus_total=32.0)]
    nodes, _ = rank_nodes(views, digest="d", in_flight={"small": 8, "large": 60}, program=b"x")
    assert nodes == ["large", "small"]


def test_a_program_has_a_home_among_equals_and_programs_spread():
    views = [_node(name) for name in "abcd"]
    homes = {}
    for number in range(200):
        program = str(number).encode()
        nodes, _ = rank_nodes(views, digest="d", in_flight={}, program=program)
        assert nodes == rank_nodes(reversed(views), digest="d", in_flight={}, program=program)[0]
        homes[nodes[0]] = homes.get(nodes[0], 0) + 1
    assert set(homes) == set("abcd")
    assert min(homes.values()) > 20


def test_a_busy_home_is_left():
    views = [_node("a"), _node("b")]
    home = rank_nodes(views, digest="d", in_flight={}, program=b"p")[0][0]
    other = "b" if home == "a" else "a"
    assert rank_nodes(views, digest="d", in_flight={home: 100}, program=b"p")[0][0] == other
