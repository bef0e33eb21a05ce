"""The clients that others wrote for SandboxFusion, from PyPI, in a directory of their own; a script that runs them.

verl is taken without its dependencies: its reward client is two files that import requests and nothing of verl. 20 MB
in all, fetched once into the user's cache; DSEC_TEST_PEERS names a directory that has them already.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = (
    "verl==0.5.0",
    "sandbox-fusion==0.3.7",
    "tenacity",
    "pydantic",
    "pydantic-core",
    "annotated-types",
    "typing-inspection",
    "typing-extensions",
)
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nomad-dsec" / "peers-1"
_LOADER = """
import importlib.util, json, pathlib, sys
home = pathlib.Path(sys.argv[1])
sys.path.insert(0, str(home))
def verl_client():
    # as a package of its own: verl/__init__.py would import torch, ray and more
    place = home / "verl/utils/reward_score/sandbox_fusion"
    spec = importlib.util.spec_from_file_location(
        "verl_sandbox_fusion", place / "__init__.py", submodule_search_locations=[str(place)]
    )
    module = sys.modules["verl_sandbox_fusion"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""


def peers_home() -> Path:
    """The directory with the packages, installed at first use; raises RuntimeError with pip's words."""
    given = os.environ.get("DSEC_TEST_PEERS", "")
    home = Path(given) if given else _CACHE
    if (home / "verl").is_dir() and (home / "sandbox_fusion").is_dir():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=home.parent))  # whole or not at all, also when two runs install at once
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(part), *PACKAGES]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        shutil.rmtree(part)
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "pip failed")
    try:
        part.rename(home)
    except OSError:
        shutil.rmtree(part)  # another run was first
    return home


def script(body: str) -> list[str]:
    """argv of a Python process in which `verl_client()` is at hand and sandbox_fusion can be imported."""
    return [sys.executable, "-W", "ignore", "-c", _LOADER + body, str(peers_home())]
