"""Specs and policies of containers for tests that start nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsec_policies.abilities import ABILITIES, Ability, HostAbilities
from dsec_policies.compile import compile_policy
from dsec_policies.model import parse_policy

from nomad_dsec.backends.container.spec import MIB, ContainerSpec, Limits, TmpfsUpper
from nomad_dsec.model import SandboxSpec

ABLE = HostAbilities(arch="x86_64", kernel="6.18", items=tuple((name, Ability(ok=True, value=7)) for name in ABILITIES))


def compiled(policy: Any = None):
    return compile_policy(parse_policy(policy), ABLE)


def container(policy: Any = None, **changes: Any) -> ContainerSpec:
    values: dict[str, Any] = {
        "id": "sb-n1-abc", "incarnation": 1, "rootfs": Path("/images/root"),
        "upper": TmpfsUpper(size_bytes=64 * MIB, inodes=4096),
        "limits": Limits(cpus=1, memory_bytes=128 * MIB, pids=64), "policy": compiled(policy), "uid_base": 1 << 28,
        "runtime_dir": Path("/data/run"), "hostname": "box",
    }  # fmt: skip
    return ContainerSpec(**(values | changes))


def sandbox(**changes: Any) -> SandboxSpec:
    values: dict[str, Any] = {
        "id": "sb-n1-abc", "incarnation": 3, "namespace": "t", "digest": "sha256:0", "backend": "container",
        "cpus": 1.0, "memory_mib": 512, "disk_mib": 1024, "pids": 64, "env": {}, "cwd": "", "user": "",
        "hostname": "", "qos": "latency_sensitive", "policy": {},
    }  # fmt: skip
    return SandboxSpec(**(values | changes))
