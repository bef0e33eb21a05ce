"""Names of sandboxes, execs and nodes. A sandbox id carries its node: any gateway replica routes without a look-up."""

from __future__ import annotations

import base64
import re
import secrets

from libdsec.errors import UsageError

NODE_PATTERN = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?")
SANDBOX_PATTERN = re.compile(r"sb-(?P<node>[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?)-(?P<random>[a-z2-7]{16})")


def _random() -> str:
    return base64.b32encode(secrets.token_bytes(10)).decode("ascii").lower()


def new_sandbox_id(node: str) -> str:
    """A fresh id `sb-<node>-<16 characters>`: 80 random bits, so ids are never used twice."""
    return f"sb-{node}-{_random()}"


def new_exec_id() -> str:
    """A fresh exec id; unique within its sandbox."""
    return f"ex-{_random()}"


def new_request_id() -> str:
    """Ties the reply of one HTTP request to its log lines."""
    return f"rq-{_random()}"


def node_of(sandbox: str) -> str:
    """The node part of a sandbox id; UsageError when it is none."""
    match = SANDBOX_PATTERN.fullmatch(sandbox)
    if match is None:
        raise UsageError(
            "bad_sandbox_id",
            f"{sandbox[:80]!r} is not a sandbox id",
            field="sandbox",
            hint="ids look like sb-<node>-<16 letters and digits>, as create and `dsec sandbox ls` print them",
        )
    return match["node"]


def check_node(node: str) -> str:
    """The node id itself when it may be one; it becomes part of cgroup, netns and nft names."""
    if NODE_PATTERN.fullmatch(node) is None:
        raise UsageError(
            "bad_node_id",
            f"{node[:80]!r} can't be a node id",
            field="node",
            hint="use 1-32 lower-case letters, digits and hyphens, not a hyphen at either end",
        )
    return node
