"""The state machine of a sandbox, pure: which state follows which, and which verb may be asked for in which."""

from __future__ import annotations

from typing import TYPE_CHECKING

from libdsec.errors import StateError
from libdsec.wire import LIVE_STATES

if TYPE_CHECKING:
    from libdsec.wire import State

# Every end passes through `stopping`: what is left of a sandbox is removed before it is called ended.
NEXT: dict[State, tuple[State, ...]] = {
    "creating": ("running", "stopping"),
    "running": ("pausing", "stopping"),
    "pausing": ("paused", "running", "stopping"),
    "paused": ("resuming", "stopping"),
    "resuming": ("running", "paused", "stopping"),
    "stopping": ("exited", "lost"),
    "exited": (),
    "lost": (),
}

# In which settled states a verb may begin. Verbs of one sandbox queue up, so the passing states are never met here
# except by kill, and by those of a daemon that died in the middle.
ALLOWED: dict[str, tuple[State, ...]] = {
    "exec": ("running",),
    "files": ("running",),
    "pause": ("running", "paused"),
    "resume": ("running", "paused"),
    "set_timeout": ("creating", "running", "paused"),
    "lease": ("creating", "running", "paused"),
    "metrics": ("running", "paused"),
}

END_REASONS = ("killed", "timeout", "lease_expired", "oom", "init_exited", "node_lost", "evicted", "policy", "error")


def is_live(state: State) -> bool:
    """Whether something of it may exist on this machine."""
    return state in LIVE_STATES


def check_transition(sandbox: str, old: State, new: State) -> None:
    """StateError illegal_transition when `new` can't follow `old`; a fault of ours, never of a request."""
    if new not in NEXT[old]:
        raise StateError(
            "illegal_transition",
            f"{sandbox} can't go from {old} to {new}",
            details={"state": old, "allowed": list(NEXT[old])},
        )


def check_verb(sandbox: str, state: State, verb: str, *, reason: str = "", message: str = "") -> None:
    """StateError sandbox_ended, or wrong_state when the verb can't begin now.

    It names the state, why it ended, and the states allowed.
    """
    allowed = ALLOWED[verb]
    if state in allowed:
        return
    why = f" ({reason}{': ' + message if message else ''})" if reason else ""
    hint = {
        "paused": "resume it first",
        "exited": "it has ended; create another",
        "lost": "it is lost; create another",
        "stopping": "it is ending; create another",
        "creating": "wait until create returns",
    }.get(state, "try again when the running change is done")
    raise StateError(
        # What is stopping has its reason and never comes back: to a caller it has ended already.
        "sandbox_ended" if state == "stopping" or not is_live(state) else "wrong_state",
        f"{sandbox} is {state}{why}; {verb} needs {' or '.join(allowed)}",
        hint=hint,
        retry_after_s=0.1 if state in ("pausing", "resuming") else None,
        details={"state": state, "reason": reason, "allowed": list(allowed)},
    )
