"""A Docker engine as a yardstick: the one that answers, or a private one where dockerd and containerd are on PATH.

The private one has network and mount namespaces of its own and keeps everything below one directory, so it needs no
init system, touches no firewall of the host, and leaves nothing behind but what that directory holds.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

IMAGE = "dsec-bench"
PARENT = "dsec-bench-docker"
START_S = 30.0
STOP_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Docker:
    """How to call it, and the image that was imported into it."""

    argv: tuple[str, ...]
    image: str = IMAGE

    def run(self, *program: str) -> list[str]:
        """argv of one `docker run --rm` without network."""
        return [*self.argv, "run", "--rm", "--network", "none", self.image, *program]


@contextmanager
def docker(work: Path, root: Path) -> Iterator[Docker | None]:
    """An engine that has the tree `root` as its image; None where there is none to be had."""
    with ExitStack() as opened:
        found = _running() or opened.enter_context(_private(work))
        if found is None:
            yield None
            return
        _import(found, root)
        opened.callback(_quietly, [*found.argv, "rmi", "--force", found.image])
        yield found


def _running() -> Docker | None:
    if shutil.which("docker") is None:
        return None
    return Docker(argv=("docker",)) if _answers(("docker",)) else None


def _answers(argv: tuple[str, ...]) -> bool:
    return subprocess.run([*argv, "version"], capture_output=True, timeout=30, check=False).returncode == 0


def _quietly(argv: list[str]) -> None:
    subprocess.run(argv, capture_output=True, timeout=120, check=False)


def _import(found: Docker, root: Path) -> None:
    tar = ["tar", "--create", "--one-file-system", "--directory", str(root), "."]
    with subprocess.Popen(tar, stdout=subprocess.PIPE) as packing:
        subprocess.run(
            [*found.argv, "import", "-", found.image], stdin=packing.stdout, check=True, timeout=600,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
    if packing.returncode != 0:
        raise RuntimeError(f"tar of {root} ended with {packing.returncode}")


@contextmanager
def _private(work: Path) -> Iterator[Docker | None]:
    if os.geteuid() != 0 or any(shutil.which(name) is None for name in ("docker", "dockerd", "containerd", "runc")):
        yield None
        return
    work.mkdir(parents=True, exist_ok=True)
    socket, log = work / "docker.sock", work / "dockerd.log"
    client = ("docker", "--host", f"unix://{socket}")
    argv = [
        *("unshare", "--mount", "--net", "--propagation", "private"),
        *("dockerd", "--host", f"unix://{socket}", "--data-root", str(work / "data")),
        *("--exec-root", str(work / "exec"), "--pidfile", str(work / "dockerd.pid")),
        *("--cgroup-parent", f"/{PARENT}", "--bridge", "none", "--iptables=false", "--ip-forward=false"),
    ]
    with log.open("wb") as out:
        engine = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + START_S
        while not _answers(client):
            if engine.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"dockerd does not answer: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.2)
        yield Docker(argv=client)
    finally:
        _stop(engine)


def _stop(engine: subprocess.Popen[bytes]) -> None:
    """It ends its containerd; what outlasts its patience is killed with its session."""
    engine.terminate()
    try:
        engine.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(engine.pid, signal.SIGKILL)
        engine.wait(STOP_S)
    for left in Path("/sys/fs/cgroup").glob(f"*/{PARENT}"):
        with suppress(OSError):
            left.rmdir()
