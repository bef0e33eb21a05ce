"""The package: cheap to import, twins never differ from their originals, every public name there."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import libdsec
import pytest

SDK = Path(__file__).parents[3] / "sdk"


def _generator():
    spec = importlib.util.spec_from_file_location("generate_sync", SDK / "generate_sync.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_method_has_a_twin():
    from libdsec import sync

    generator = _generator()
    for owner, (home, twin) in generator.TWINS.items():
        original = getattr(importlib.import_module(f"libdsec.{home}"), owner)
        for name, _ in inspect.getmembers(original):
            if not name.startswith("_") and name not in generator.LEFT_OUT | {"transport"}:
                assert hasattr(getattr(sync, twin), name), f"{twin}.{name}"


def test_public_names_load_and_others_do_not():
    for name in libdsec.__all__:
        assert getattr(libdsec, name) is not None
    with pytest.raises(AttributeError, match="Sandboxx"):
        _ = libdsec.Sandboxx
