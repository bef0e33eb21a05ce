"""The one exception of this room; the node turns it into the error that a user sees."""

from __future__ import annotations


class PolicyError(Exception):
    """A policy that can't be read or can't be enforced here.

    Attributes: ``code`` (a stable word: ``policy_invalid`` or ``policy_unenforceable``), ``message`` (what is wrong),
    ``hint`` (what to do about it), ``field`` (the key of the policy or the clause at fault, ``policy`` for the whole).
    """

    def __init__(self, code: str, message: str, *, hint: str, field: str) -> None:
        """Stores the four parts; the text joins them."""
        super().__init__(f"{field}: {message} ({hint})")
        self.code = code
        self.message = message
        self.hint = hint
        self.field = field


class FilterError(Exception):
    """A seccomp profile that can't be turned into a program: a bug in the profile, never the user's fault."""
