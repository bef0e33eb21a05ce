"""What every test with a real sandbox is marked with."""

from __future__ import annotations

import pytest

from tests.kit.abilities import needs

#: leaks_ok: the session's pools change behind the tests; conftest takes the census around all of them.
IN_SANDBOX = [
    pytest.mark.leaks_ok,
    needs("root", "filters", "userns", "netns", "erofs", "overlay", "cgroup", "cc", "x86_64"),
]
