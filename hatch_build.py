"""Builds dsec-init from its C sources when the package is built or installed in place."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ModuleNotFoundError:  # run as a script, to rebuild by hand

    class BuildHookInterface:  # type: ignore[no-redef]
        """Stands in for hatchling's class."""


ROOT = Path(__file__).resolve().parent


def build_guest() -> Path:
    """Compile dsec-init into nomad_dsec/guest/bin; returns the path of the binary."""
    module = runpy.run_path(str(ROOT / "nomad_dsec" / "guest" / "build.py"))
    return Path(module["build"](ROOT / "nomad_dsec" / "guest" / "bin"))


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """hatchling calls initialize() before a wheel or an editable install is made."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and mark the wheel as belonging to this machine's architecture."""
        build_guest()
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


if __name__ == "__main__":
    build_guest()
