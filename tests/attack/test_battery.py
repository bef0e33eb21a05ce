"""The battery of policy.md section 3.3 in a sandbox with the default policy, each with its layer and its twin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from dsec_policies.profiles import DEFAULT

from tests.attack import battery
from tests.attack.marks import IN_SANDBOX
from tests.kit.abilities import needs
from tests.kit.attacker import run_filtered, run_naive

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kit.sandbox import Box

pytestmark = IN_SANDBOX
ARGVS = tuple(attack.argv for attack in battery.ALL)
NUMBERED = [pytest.param(number, attack, id=attack.name) for number, attack in enumerate(battery.ALL)]


@pytest.fixture(scope="module")
def naive(attacker: Path, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """By root in fresh namespaces, without any policy."""
    work = str(tmp_path_factory.mktemp("naive"))
    return battery.outcomes(run_naive(attacker, *battery.command(ARGVS, work)), len(ARGVS))


@pytest.fixture(scope="module")
def filter_alone(attacker: Path, tmp_path_factory: pytest.TempPathFactory, default_program: bytes) -> list[int]:
    """By the host's root with every capability, under the filter and nothing else."""
    work = str(tmp_path_factory.mktemp("filtered"))
    argvs = tuple(attack.argv if attack.layer == battery.SECCOMP else ("jit",) for attack in battery.ALL)
    return battery.outcomes(run_filtered(default_program, attacker, *battery.command(argvs, work)), len(ARGVS))


async def test_every_attack_is_denied_inside(box: Box) -> None:
    """One exec for all of them, as root inside."""
    got = battery.outcomes(await box.attack(*battery.command(ARGVS, "/work")), len(ARGVS))
    wrong = {a.name: (code, a.denied) for a, code in zip(battery.ALL, got, strict=True) if code != a.denied}
    assert not wrong, f"attack: (got, must be) {wrong}"


@needs("crun")
async def test_every_attack_is_denied_by_the_oci_launcher_too(crun_box: Box) -> None:
    """The same spec launched by crun: the same refusals, one by one."""
    got = battery.outcomes(await crun_box.attack(*battery.command(ARGVS, "/work")), len(ARGVS))
    wrong = {a.name: (code, a.denied) for a, code in zip(battery.ALL, got, strict=True) if code != a.denied}
    assert not wrong, f"attack: (got, must be) {wrong}"
    peeked = await crun_box.attack("peek", *DEFAULT.masked_paths)
    assert {path: size for path, size in peeked.items() if size > 0} == {}


async def test_every_attack_is_denied_to_a_user(box: Box) -> None:
    """As uid 1000: nothing is easier for those without root; some things fail earlier."""
    got = battery.outcomes(await box.attack(*battery.command(ARGVS, "/tmp"), user="1000"), len(ARGVS))
    assert {a.name: code for a, code in zip(battery.ALL, got, strict=True) if code == 0} == {}


@pytest.mark.parametrize(("number", "attack"), NUMBERED)
def test_twin_without_a_policy_it_gets_further(naive: list[int], number: int, attack: battery.Attack) -> None:
    assert naive[number] in attack.bare


SECCOMP_CASES = [case for case in NUMBERED if case.values[1].layer == battery.SECCOMP]  # type: ignore[union-attr]


@pytest.mark.parametrize(("number", "attack"), SECCOMP_CASES)
def test_the_layer_is_the_filter(filter_alone: list[int], number: int, attack: battery.Attack) -> None:
    """The same refusal for the host's root: nothing but the filter can have given it."""
    assert filter_alone[number] == attack.denied


async def test_ordinary_work_goes_on(box: Box) -> None:
    argvs = tuple(argv for argv, _ in battery.ORDINARY)
    got = battery.outcomes(await box.attack(*battery.command(argvs, "/work")), len(argvs))
    wrong = {argv: code for (argv, wanted), code in zip(battery.ORDINARY, got, strict=True) if code != wanted}
    assert not wrong
