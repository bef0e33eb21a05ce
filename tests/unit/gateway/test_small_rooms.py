"""Endpoints, image index, roster, openness of ids: the pure parts of the gateway."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libdsec import wire
from libdsec.errors import UsageError

from nomad_dsec.gateway.endpoints import Endpoint, parse_endpoint
from nomad_dsec.gateway.failpoints import Failpoints
from nomad_dsec.gateway.idempotency import fingerprint
from nomad_dsec.gateway.images import ImageIndex
from nomad_dsec.gateway.roster import Roster, Usage


def test_endpoints_parse():
    assert parse_endpoint("unix:/run/n.sock") == Endpoint(unix_path="/run/n.sock")
    assert parse_endpoint("http://10.0.0.1:80#tok") == Endpoint(url="http://10.0.0.1:80", token="tok")
    assert parse_endpoint("http://[::1]:80/#tok").url == "http://[::1]:80"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "unix:relative",
        "https://h:1#t",
        "http://h#t",
        "http://h:1",
        "http://h:99999#t",
        "http://h:1/x#t",
        "http://u@h:1#t",
    ],
)
def test_bad_endpoints_are_named_without_their_token(text):
    with pytest.raises(UsageError) as caught:
        parse_endpoint(text + "secret" if "#" in text else text)
    assert caught.value.field == "gateway.nodes"
    assert "secret" not in str(caught.value)
    assert caught.value.hint


def test_a_token_is_not_in_the_text_of_an_endpoint():
    assert "tok" not in repr(parse_endpoint("http://h:1#tok"))


def image(digest: str, *names: str, at: float = 1.0) -> wire.ImageInfo:
    return wire.ImageInfo(digest=digest, names=list(names), created_at=at)


def test_names_mean_the_newest_image_and_latest_may_be_left_out():
    index = ImageIndex()
    index.replace("n1", [image("sha256:old", "app:latest", at=1), image("sha256:b", "base:1")])
    index.replace("n2", [image("sha256:new", "app:latest", at=2)])
    assert index.resolve("app") == index.resolve("app:latest") == "sha256:new"
    assert index.resolve("sha256:old") == "sha256:old"
    assert index.resolve("nothing") == ""
    assert index.digests_on("n1") == {"sha256:old", "sha256:b"}
    index.forget("n2")
    assert index.resolve("app") == "sha256:old"


def test_a_listing_joins_the_names_of_all_nodes():
    index = ImageIndex()
    index.replace("n1", [image("sha256:a", "one")])
    index.replace("n2", [image("sha256:a", "two")])
    assert [(one.digest, one.names) for one in index.listing().images] == [("sha256:a", ["one", "two"])]


def box(name: str, state: str = "running", node: str = "n1", **fields) -> wire.SandboxInfo:
    known = {"namespace": "a", "backend": "container", "image": "i", "digest": "d", "cpus": 0.1, "memory_mib": 10}
    return wire.SandboxInfo(id=name, node=node, state=state, **(known | fields))


def test_the_roster_keeps_what_was_shown_after_a_listing_was_asked_for():
    roster = Roster()
    roster.put(box("old"), at=1.0)
    roster.put(box("new"), at=3.0)
    roster.put(box("killed", "exited"), at=3.0)
    roster.replace("n1", [box("killed"), box("found")], as_of=2.0)
    assert {info.id: info.state for info in roster.on_node("n1")} == {
        "new": "running",
        "killed": "exited",
        "found": "running",
    }
    assert roster.usage("a").sandboxes == roster.live_on("n1") == 2


def test_a_roster_keeps_no_token():
    roster = Roster()
    roster.put(box("x", token="secret"), at=1.0)
    assert "secret" not in repr(roster.get("n1", "x"))


moves = st.lists(
    st.tuples(
        st.sampled_from(["put", "replace", "forget"]),
        st.integers(0, 5),
        st.sampled_from(["running", "paused", "exited", "lost"]),
        st.sampled_from(["n1", "n2"]),
        st.sampled_from(["a", "b"]),
    ),
    max_size=50,
)


@given(moves)
def test_use_is_always_the_sum_over_live_sandboxes(steps):
    roster = Roster()
    for at, (move, number, state, node, namespace) in enumerate(steps):
        if move == "forget":
            roster.forget(node)
        elif move == "put":
            roster.put(box(f"{namespace}{number}", state, node, namespace=namespace), at=float(at))
        else:
            roster.replace(node, [box(f"{namespace}{number}", state, node, namespace=namespace)], as_of=at - 0.5)
        everything = [info for name in ("n1", "n2") for info in roster.on_node(name)]
        for name in ("a", "b"):
            mine = [info for info in everything if info.namespace == name and info.state in wire.LIVE_STATES]
            used = roster.usage(name)
            assert (used.sandboxes, used.memory_mib) == (len(mine), 10 * len(mine))
            assert used.cpus == pytest.approx(0.1 * len(mine))
        for name in ("n1", "n2"):
            assert roster.live_on(name) == sum(info.state in wire.LIVE_STATES for info in roster.on_node(name))


def test_usage_without_sandboxes_has_no_dust():
    roster = Roster()
    for number in range(7):
        roster.put(box(f"s{number}"), at=1.0)
    for number in range(7):
        roster.put(box(f"s{number}", "exited"), at=2.0)
    assert roster.usage("a") == Usage()


def test_fingerprints_tell_apart_what_differs_and_only_that():
    base = {"image": "i", "labels": {"a": "1", "b": "2"}}
    same = {"image": "i", "labels": {"b": "2", "a": "1"}, "cpus": 1.0}
    one, two = wire.CreateRequest(**base), wire.CreateRequest(**same)
    assert fingerprint("n", one) == fingerprint("n", two)
    assert fingerprint("m", one) != fingerprint("n", one)
    assert fingerprint("n", wire.CreateRequest(**base, secrets={"k": "1"})) != fingerprint(
        "n", wire.CreateRequest(**base, secrets={"k": "2"})
    )


def test_an_unknown_failpoint_is_a_usage_error():
    with pytest.raises(UsageError):
        Failpoints("nowhere")
    Failpoints("journaled:3").reach("journaled")
