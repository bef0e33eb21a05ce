"""A policy that is accepted and then not in force: the create must fail, and nothing may be left of it.

claude-agent-sdk #309, claude-code #77045, OpenSandbox PR 183: lists that were taken and not enforced. Here one step of
the launch is left out on purpose, and what must notice is the probe that dsec-init makes before the first user command.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from dsec_policies.abilities import Ability
from libdsec.errors import DsecError, PlatformError

from nomad_dsec.backends.container import native
from nomad_dsec.backends.container.plan_ops import Op, pack_ops, pack_plan
from tests.attack.marks import IN_SANDBOX

if TYPE_CHECKING:
    from collections.abc import Callable

    from nomad_dsec.backends.container.plan import Plan
    from nomad_dsec.backends.container.spec import ContainerSpec
    from tests.kit.sandbox import Machine

pytestmark = IN_SANDBOX
PROTECT = {"protected_paths": ["/bin/bash"]}
LEFT_OUT: dict[str, tuple[dict[str, Any], Callable[[Op], bool], str]] = {
    "the filter": ({}, lambda op: op.name == "seccomp", "system_calls"),
    "a protected path": (PROTECT, lambda op: op.name == "readonly" and op.values[0] == "/bin/bash", "protected_paths"),
}


def tamper(monkeypatch: pytest.MonkeyPatch, change: Callable[[Op], Op | None]) -> None:
    """Let `change` alter or drop (None) operations of every plan that the native launcher is given."""
    complete = native.plan_container

    def altered(spec: ContainerSpec, **facts: Any) -> Plan:
        plan = complete(spec, **facts)
        index = {name: number for number, name in enumerate(plan.fds)}
        parts = {
            part: tuple(new for op in getattr(plan, part) if (new := change(op)) is not None)
            for part in ("head", "fixed", "own", "tail")
        }
        ops = [op for part in parts.values() for op in part]
        assert ops != list(plan.ops), "the test's own aim: something was changed"
        packed = pack_plan(len(ops), tuple(pack_ops(part, index) for part in parts.values()))
        return replace(plan, **parts, packed=packed)

    monkeypatch.setattr(native, "plan_container", altered)


@pytest.mark.parametrize("name", LEFT_OUT)
async def test_a_step_that_did_not_happen_fails_the_create(
    machine: Machine, image: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    policy, dropped, clause = LEFT_OUT[name]
    tamper(monkeypatch, lambda op: None if dropped(op) else op)
    live = len(machine.backend._live)
    with pytest.raises(PlatformError, match=clause) as caught:
        async with machine.sandbox(image, policy):
            pass
    assert caught.value.code == "policy_not_enforced"
    assert len(machine.backend._live) == live


@pytest.mark.parametrize(
    ("network", "lacking"), [("none", "net_namespaces"), ("open", "nftables"), ("none", "seccomp_filter")]
)
async def test_a_host_that_lacks_the_layer_refuses_the_create(
    machine: Machine, image: str, monkeypatch: pytest.MonkeyPatch, network: str, lacking: str
) -> None:
    """OpenSandbox PR 183: nft failed and the sandbox went on with names only."""
    host = machine.backend._host
    gone = Ability(ok=False, detail="taken away by the test")
    items = tuple((name, gone if name == lacking else item) for name, item in host.abilities.items)
    monkeypatch.setattr(host, "abilities", replace(host.abilities, items=items))
    with pytest.raises(DsecError, match="taken away by the test") as caught:
        async with machine.sandbox(image, {"network": network}):
            pass
    assert caught.value.code == "policy_unenforceable"
    assert caught.value.field.startswith("policy.")


async def test_only_names_below_user_are_sysctls(machine: Machine, image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CVE-2022-0811: a setting that reaches the host's core_pattern is refused by the launcher, whoever asks."""
    evil = Op("sysctl", ("kernel/core_pattern", "|/evil"))
    tamper(monkeypatch, lambda op: evil if op.name == "sysctl" else op)
    with pytest.raises(PlatformError) as caught:
        async with machine.sandbox(image):
            pass
    assert caught.value.code == "launch_failed"
    assert caught.value.details["errno"] == "EPERM"


async def test_the_twin_with_every_step_starts(machine: Machine, image: str) -> None:
    async with machine.sandbox(image, PROTECT) as box:
        assert {row["clause"] for row in box.started.policy["clauses"]} >= {"system_calls", "protected_paths"}
        assert box.started.policy["unenforced"] == []
