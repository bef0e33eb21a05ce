"""The state machine by itself: every end is reached through `stopping`, nothing follows an end, refusals explain."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libdsec.errors import StateError
from libdsec.wire import LIVE_STATES

from nomad_dsec.node.states import ALLOWED, NEXT, check_transition, check_verb, is_live

STATES = sorted(NEXT)


@given(st.lists(st.sampled_from(STATES), max_size=12))
def test_a_walk_that_is_accepted_ends_only_through_stopping(wanted):
    state, seen = "creating", ["creating"]
    for new in wanted:
        try:
            check_transition("sb", state, new)
        except StateError as error:
            assert error.details == {"state": state, "allowed": list(NEXT[state])}
            continue
        state = new
        seen.append(new)
    assert all(is_live(passed) for passed in seen[:-1]), "nothing follows an end"
    if not is_live(seen[-1]):
        assert seen[-2] == "stopping"
    if "paused" in seen:
        assert seen[seen.index("paused") - 1] in ("pausing", "resuming")


def test_each_live_state_can_be_ended_and_only_those():
    for state in STATES:
        can_stop = "stopping" in NEXT[state]
        assert can_stop == (state in LIVE_STATES and state != "stopping")


@pytest.mark.parametrize("verb", sorted(ALLOWED))
@pytest.mark.parametrize("state", STATES)
def test_a_refused_verb_names_state_reason_and_what_is_allowed(verb, state):
    if state in ALLOWED[verb]:
        check_verb("sb-1", state, verb)
        return
    with pytest.raises(StateError) as caught:
        check_verb("sb-1", state, verb, reason="oom", message="its init was killed")
    assert caught.value.code == ("wrong_state" if is_live(state) and state != "stopping" else "sandbox_ended")
    assert caught.value.details["allowed"] == list(ALLOWED[verb])
    assert state in caught.value.message
    assert "oom: its init was killed" in caught.value.message
    assert caught.value.hint
