"""Runs inside the sandbox: grades one test file and writes {"passed": n, "total": n} to the path given second."""

import json
import sys

import pytest


class Counter:
    """Counts the outcomes of test calls, and the tests that there are."""

    def __init__(self):
        self.passed = 0
        self.total = 0

    def pytest_collection_finish(self, session):
        """Every collected test counts, whether or not it gets to run."""
        self.total = len(session.items)

    def pytest_runtest_logreport(self, report):
        """A test passes in its call phase."""
        if report.when == "call" and report.passed:
            self.passed += 1


counter = Counter()
pytest.main(["-q", "--tb=no", "-p", "no:cacheprovider", sys.argv[1]], plugins=[counter])
with open(sys.argv[2], "w", encoding="utf-8") as out:
    json.dump({"passed": counter.passed, "total": counter.total}, out)
