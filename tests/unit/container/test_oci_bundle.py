"""config.json as the runtime-spec wants it, and what goes round it: secrets never in what is printed or stored."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from nomad_dsec.backends.container import oci_bundle
from nomad_dsec.backends.container.oci_bundle import HostFacts, describe, inside_ops, pack_inside, render_config
from nomad_dsec.backends.container.plan import plan_container
from nomad_dsec.backends.container.plan_ops import HEADER, PLAN_MAGIC
from nomad_dsec.backends.container.spec import DirUpper
from tests.unit.container.samples import container

FACTS = HostFacts(hard_limits={"NOFILE": 1000}, may_protect=False)
POLICIES = ({}, {"profile": "debug"}, {"no_new_privs": False}, {"protected_paths": ["/bin/bash"]})


def test_ids_namespaces_and_root() -> None:
    config = render_config(container(), FACTS)
    assert config["linux"]["uidMappings"] == [{"containerID": 0, "hostID": 1 << 28, "size": 65536}]
    assert config["linux"]["gidMappings"] == config["linux"]["uidMappings"]
    # the network namespace is inherited: the slot's belongs to the host, which a runtime could not join from inside
    assert {item["type"] for item in config["linux"]["namespaces"]} == {"pid", "ipc", "uts", "mount", "user", "cgroup"}
    assert config["root"] == {"path": "root", "readonly": False}
    assert json.loads(json.dumps(config)) == config


def test_process_gets_what_the_policy_says_and_no_more() -> None:
    process = render_config(container(), FACTS)["process"]
    assert "CAP_SYS_ADMIN" not in process["capabilities"]["bounding"]
    assert "CAP_SETPCAP" in process["capabilities"]["effective"]
    assert process["capabilities"].keys() == {"bounding", "effective", "permitted"}
    assert process["noNewPrivileges"] is True
    assert {"type": "RLIMIT_NOFILE", "soft": 1000, "hard": 1000} in process["rlimits"]
    assert {"type": "RLIMIT_CORE", "soft": 0, "hard": 0} in process["rlimits"]
    assert "oomScoreAdj" not in process
    assert render_config(container(), HostFacts(hard_limits={}, may_protect=True))["process"]["oomScoreAdj"] < 0


def test_the_numbers_of_descriptors_agree() -> None:
    args = render_config(container(), FACTS)["process"]["args"]
    assert args[0] == f"/proc/self/fd/{oci_bundle.IMAGE_FD}"
    assert args[args.index("--plan") + 1] == str(oci_bundle.PLAN_FD)
    assert args[args.index("--status") + 1] == str(oci_bundle.STATUS_FD)
    numbers = [
        oci_bundle.LISTEN_FD,
        oci_bundle.CGROUP_FD,
        oci_bundle.OOM_FD,
        oci_bundle.PLAN_FD,
        oci_bundle.IMAGE_FD,
        oci_bundle.STATUS_FD,
    ]
    assert numbers == list(range(3, 3 + oci_bundle.PRESERVED))


@pytest.mark.parametrize("policy", POLICIES)
def test_dsec_init_takes_rights_away_as_with_the_native_launcher(policy: dict[str, object]) -> None:
    spec = container(policy)
    taken = {"landlock", "no_new_privs", "landlock_self", "caps", "seccomp", "serve"}
    native = [op for op in plan_container(spec, controllers=("cpu",), unified=True).ops if op.name in taken]
    assert list(inside_ops(spec, unified=True)) == native
    assert HEADER.unpack_from(pack_inside(inside_ops(spec, unified=True)))[:3] == (PLAN_MAGIC, 1, len(native))


def test_masks_and_read_only_paths() -> None:
    spec = container()
    linux = render_config(spec, FACTS)["linux"]
    assert linux["maskedPaths"] == list(spec.policy.masked_paths)
    assert set(spec.policy.read_only_paths) - set(linux["readonlyPaths"]) == {"/sys"}
    # nothing is mounted below /sys by the runtime: its sysfs comes with the root, read-only
    assert not [mount for mount in render_config(spec, FACTS)["mounts"] if mount["destination"].startswith("/sys")]


def test_only_runc_is_told_a_cgroup() -> None:
    assert "cgroupsPath" not in render_config(container(), FACTS)["linux"]
    named = HostFacts(hard_limits={}, may_protect=False, cgroups_path="/dsec-n1/c1")
    assert render_config(container(), named)["linux"]["cgroupsPath"] == "/dsec-n1/c1"


def test_secrets_go_to_the_stage_alone() -> None:
    spec = container(secrets={"token": "s3cret"})
    coded = base64.b64encode(b"s3cret").decode()
    assert oci_bundle.stage_request(spec)["secrets"] == {"token": coded}
    printed = json.dumps(describe(spec, FACTS, unified=True)) + json.dumps(render_config(spec, FACTS))
    assert "s3cret" not in printed
    assert coded not in printed
    assert "token" in printed


def test_both_kinds_of_upper() -> None:
    assert oci_bundle.stage_request(container())["upper"] == {"size_bytes": 64 << 20, "inodes": 4096}
    upper = DirUpper(path=Path("/u"))
    assert oci_bundle.stage_request(container(upper=upper))["upper"] == {"upper": "/u/upper", "work": "/u/work"}
