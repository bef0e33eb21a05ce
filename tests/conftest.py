"""Abilities, the skip table, and the leak check that runs around system tests."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.kit.abilities import missing
from tests.kit.leaks import Census
from tests.kit.skips import LISTED, SkipTable, parse_list

_table = SkipTable()
_CHECKED = ("tests/system", "tests/attack", "tests/contract")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*abilities): skipped, with the reason, where the machine lacks one")
    config.addinivalue_line("markers", "leaks_ok: the leak check does not apply (says why in the test)")
    # A shell starts background jobs with SIGINT ignored, nohup ignores SIGHUP; children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if config.option.basetemp and os.geteuid() == 0:
        _detach_below(Path(config.option.basetemp).resolve())


def _detach_below(directory: Path) -> None:
    """pytest removes its old base directory file by file, through whatever a killed run left mounted there."""
    rows = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines())
    below = [row[4] for row in rows if Path(row[4]).is_relative_to(directory)]
    for path in reversed(below):
        subprocess.run(["umount", "--lazy", path], check=False, timeout=30, capture_output=True)


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # unit first: a cheap failure is seen before a dear one
    order = {name: place for place, name in enumerate(("repo", "unit", "contract", "system", "attack", "bench"))}
    items.sort(key=lambda item: order.get(item.nodeid.split("/")[1] if "/" in item.nodeid else "", 9))
    for item in items:
        for name in {name for mark in item.iter_markers("needs") for name in mark.args}:
            _table.marked[_file(item), name] += 1


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            if reason := missing(name):
                _table.skipped[_file(item), name] += 1
                _table.reasons[name] = reason
                pytest.skip(f"ability {name}: {reason}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple) and "ability " not in report.longrepr[2]:
        _table.other.append(f"{report.nodeid}: {report.longrepr[2]}")
    if report.failed and (path := os.environ.get("DSEC_FAILURES")):  # to read them while the rest still runs
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{report.when} {report.nodeid}\n{report.longreprtext}\n\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = _table.render()
    if lines:
        terminalreporter.section("skipped, and why")
        for line in lines:
            terminalreporter.write_line(line)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if os.environ.get("DSEC_CHECK_SKIPS") != "1" or not hasattr(session, "items"):
        return
    files = {_file(item) for item in session.items}
    lost = _table.losses(parse_list(LISTED.read_text()), files=files)
    for line in lost:
        print(f"\ncoverage lost: {line}")
    if lost and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def _no_leaks(request: pytest.FixtureRequest):
    """Descriptors, children, mounts, namespaces, cgroups and nft tables of ours are as before the test."""
    item = request.node
    if not item.nodeid.startswith(_CHECKED) or item.get_closest_marker("leaks_ok"):
        yield
        return
    before = Census.take()
    yield
    left = before.wait_same(timeout_s=5.0)
    assert not left, "left behind: " + "; ".join(left)
