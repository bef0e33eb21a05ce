"""`dsec dev` for tests: the real gateway and node daemon of this tree, on a directory of the test's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsec_imagefs import ImageStore

from nomad_dsec.cli.demo import PACKAGES, SUITE

if TYPE_CHECKING:
    from collections.abc import Sequence

REPO = Path(__file__).parents[2]


@dataclass(slots=True)
class DevStack:
    """A running `dsec dev --detach`."""

    data: Path
    endpoint: str = ""
    api_key: str = ""
    backend: str = ""

    def dsec(self, *argv: str, stdin: bytes | None = b"", timeout: float = 60) -> subprocess.CompletedProcess[bytes]:
        """Run the CLI against it; stdin None is /dev/null."""
        env = {key: value for key, value in os.environ.items() if not key.startswith("DSEC_")}
        env |= {"DSEC_DATA": str(self.data), "PYTHONPATH": f"{REPO}:{REPO / 'sdk'}:{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, "-m", "nomad_dsec.cli", *argv]
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
        return subprocess.run(command, **given, capture_output=True, timeout=timeout, env=env, check=False)

    def start(self, *flags: str) -> None:
        """Start it, or raise with its words."""
        done = self.dsec("dev", "--detach", "--json", *flags, timeout=120)
        if done.returncode != 0:
            raise RuntimeError(done.stderr.decode() + self.logs())
        told = json.loads(done.stdout)
        self.endpoint, self.api_key = told["endpoint"], told["api_key"]

    def stop(self, *flags: str) -> None:
        """Stop it; nothing of it runs after."""
        done = self.dsec("dev", "stop", *flags, timeout=120)
        assert done.returncode == 0, done.stderr.decode() + self.logs()

    def state(self) -> dict[str, Any]:
        """dev.json."""
        found: dict[str, Any] = json.loads((self.data / "dev.json").read_bytes())
        return found

    def kill(self, which: str, signal: int = 9) -> int:
        """SIGKILL the supervisor, `node` or `gateway`; returns its pid."""
        state = self.state()
        pid = int((state["supervisor"] if which == "supervisor" else state["children"][which])["pid"])
        os.kill(pid, signal)
        return pid

    def wait_other_pid(self, which: str, old: int, timeout_s: float = 20) -> int:
        """Wait until the child was started again."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            pid = int(self.state()["children"][which]["pid"])
            if pid != old:
                return pid
            time.sleep(0.05)
        raise AssertionError(f"{which} was not started again")

    def pids(self) -> list[int]:
        """Processes whose command line names our directory."""
        return processes_naming(str(self.data))

    def logs(self) -> str:
        """The ends of all logs."""
        parts: Sequence[Path] = sorted((self.data / "logs").glob("*.log"))
        return "".join(f"\n== {path.name}\n{path.read_text()[-2000:]}" for path in parts)


def processes_naming(text: str) -> list[int]:
    """Pids (but ours) that have text in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if text.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def image_store() -> Path:
    """A store that has the development image: DSEC_TEST_STORE, that of `dsec demo`, or one built once for all tests.

    Building takes about a minute (debootstrap), so it is kept in ~/.cache; a test that uses it needs a longer timeout.
    """
    for store in (os.environ.get("DSEC_TEST_STORE", ""), "/var/lib/dsec-demo/images"):
        if store and any(Path(store, "refs").glob("debian-dev*")):
            ImageStore(Path(store))  # one of an older format is converted now, not while a daemon is waited for
            return Path(store)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsec-test" / "images"
    cache.mkdir(parents=True, exist_ok=True)
    made = ImageStore(cache)
    if not any((cache / "refs").glob("debian-dev*")):
        made.import_image(f"debootstrap:{SUITE}?include={PACKAGES}", "debian-dev")
    return cache
