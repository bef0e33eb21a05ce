"""The attacker's binary for the whole session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kit.attacker import build_attacker

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def attacker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The payload, statically linked, so that it runs in any image."""
    return build_attacker(tmp_path_factory.mktemp("attacker"))
