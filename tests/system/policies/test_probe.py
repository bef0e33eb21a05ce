"""Probing this host for real: truthful against what can be checked otherwise, bounded, and nothing left behind."""

import os
import time
from pathlib import Path

import pytest
from dsec_policies.abilities import ABILITIES
from dsec_policies.compile import compile_policy
from dsec_policies.host_probes import run_bounded
from dsec_policies.model import Policy
from dsec_policies.probe import probe

from tests.kit.abilities import missing, needs


@pytest.fixture(scope="module")
def host():
    return probe()


def test_every_ability_has_an_answer_with_a_reason(host) -> None:
    assert [name for name, _ in host.items] == list(ABILITIES)
    for name, item in host.items:
        assert item.detail, name
        assert item.detail != "the probe gave no answer in time", name


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("seccomp_filter", "filters"),
        ("user_namespaces", "userns"),
        ("net_namespaces", "netns"),
        ("landlock", "landlock"),
    ],
)
@needs("root")
def test_answers_agree_with_the_tests_own_tries(host, ours: str, theirs: str) -> None:
    assert host.has(ours) == (missing(theirs) == "")


@needs("root")
def test_a_probe_leaves_nothing(host) -> None:
    assert "dsec-probe" not in Path("/proc/self/mountinfo").read_text()
    assert not list(Path("/tmp").glob("dsec-probe-*"))
    assert not list(Path("/sys/fs/cgroup").glob("*/dsec-probe-*"))


@needs("root", "filters", "userns", "netns")
def test_the_default_policy_compiles_here(host) -> None:
    assert not compile_policy(Policy(), host).unenforced


def test_a_probe_that_hangs_costs_its_deadline_only() -> None:
    began = time.monotonic()
    ok, detail, _ = run_bounded(lambda: time.sleep(60) or ("never", 0), timeout_s=0.3)
    assert not ok
    assert "0.3 s" in detail
    assert time.monotonic() - began < 30


def test_a_probe_that_dies_is_an_answer() -> None:
    ok, detail, _ = run_bounded(lambda: os.kill(os.getpid(), 9) or ("never", 0))
    assert (ok, detail) == (False, "the kernel killed the probe")


def test_a_probe_s_exception_is_the_reason() -> None:
    def refuse() -> tuple[str, int]:
        raise OSError(1, "bpf: Operation not permitted")

    assert run_bounded(refuse) == (False, "bpf: Operation not permitted", 0)
