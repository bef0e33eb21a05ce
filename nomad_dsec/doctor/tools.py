"""Programs of the host that some commands call, and the Docker engine."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Final

from nomad_dsec.doctor.row import Check

# program -> (package, for what)
_TOOLS: Final = {
    "cc": ("gcc libc6-dev", "building dsec-init"),
    "nft": ("nftables", "network=open"),
    "skopeo": ("skopeo", "dsec image import docker://"),
    "debootstrap": ("debootstrap", "dsec image import --debootstrap"),
    "crun": ("crun", "node.launcher = oci:crun"),
    "runc": ("runc", "node.launcher = oci:runc"),
}
# not of Debian's
_AGENTS: Final = {"nomad": "dsec dev --nomad, or a Nomad client here", "consul": "dsec dev --nomad, or Consul's agent"}
_AGENTS_FIX: Final = "install from https://developer.hashicorp.com (Nomad 1.6 or later, any Consul)"
_DOCKER_SOCKET: Final = Path("/var/run/docker.sock")
_TIMEOUT_S: Final = 3.0


def check_tools() -> list[Check]:
    """What is on PATH."""
    wanted = {program: (purpose, f"apt install {package}") for program, (package, purpose) in _TOOLS.items()}
    wanted |= {program: (purpose, _AGENTS_FIX) for program, purpose in _AGENTS.items()}
    rows = []
    for program, (purpose, fix) in wanted.items():
        path = shutil.which(program)
        rows.append(
            Check(
                name=f"{program} program" if program in _AGENTS else program,
                ok=path is not None,
                reason=path or f"not on PATH: needed for {purpose}",
                fix="" if path else fix,
            )
        )
    return rows


def check_docker() -> list[Check]:
    """Whether an engine answers on its usual socket; only importing images from it needs one."""
    answer = ask_docker(_DOCKER_SOCKET)
    ok = answer == "OK"
    return [
        Check(
            name="docker engine",
            ok=ok,
            reason="answers" if ok else answer,
            fix="" if ok else "only `dsec image import docker-daemon:` needs one",
        )
    ]


def ask_docker(path: Path) -> str:
    """Say "OK" or why not, by GET /_ping of the engine's API."""
    if not path.exists():
        return f"{path} is not there"
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(_TIMEOUT_S)
            client.connect(str(path))
            client.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            reply = client.recv(4096)
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return "OK" if reply.startswith((b"HTTP/1.0 200", b"HTTP/1.1 200")) else f"{path} gave {reply[:40]!r}"
