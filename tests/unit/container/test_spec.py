"""Bad secrets and mounts are refused with the field; sizes of the layer in memory leave room for programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from libdsec.errors import PlatformError, UsageError

from nomad_dsec.backends.container.compose import compose, log_bytes, shm_bytes, tmpfs_bytes
from nomad_dsec.backends.container.record import Record, owner_label, read_record
from nomad_dsec.backends.container.spec import MIB, DirUpper, HostMount, TmpfsUpper, check_mounts, check_secrets
from nomad_dsec.linux.upper_layer import UpperLayer
from nomad_dsec.model import Handle
from tests.unit.container.samples import compiled, sandbox


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0b", "x" * 256])
def test_secret_names_that_are_no_file_names(name):
    with pytest.raises(UsageError) as caught:
        check_secrets({name: "x"})
    assert caught.value.code == "bad_secret_name"
    assert caught.value.field.startswith("secrets.")


def test_secrets_are_bounded():
    check_secrets({"a": "x" * 200_000, "b": "y" * 200_000})
    with pytest.raises(UsageError, match="secret_too_large"):
        check_secrets({"a": "x" * 300_000})
    with pytest.raises(UsageError, match="secret_too_large"):
        check_secrets({f"s{i}": "x" * 200_000 for i in range(6)})


ROOTS = (Path("/srv/data"),)


@pytest.mark.parametrize("source", ["/srv", "/srv/data/../x", "/srv/database", "relative", "/"])
def test_sources_outside_the_allowed_roots(source):
    with pytest.raises(UsageError) as caught:
        check_mounts((HostMount(source=Path(source), target="/x"),), ROOTS)
    assert caught.value.field == "mounts[0].source"


@pytest.mark.parametrize("target", ["/", "/proc", "/sys/fs", "/dev/shm", "rel", "/a/../proc"])
def test_targets_that_are_the_kernels(target):
    with pytest.raises(UsageError) as caught:
        check_mounts((HostMount(source=Path("/srv/data/a"), target=target),), ROOTS)
    assert caught.value.field == "mounts[0].target"


def test_good_mounts_pass():
    check_mounts((HostMount(source=Path("/srv/data/a"), target="/mnt/a"),), ROOTS)


@pytest.mark.parametrize(("memory", "disk", "size"), [(512, 1024, 320), (512, 64, 64), (64, 64, 40), (16, 64, 6)])
def test_a_layer_in_memory_leaves_memory_to_programs(memory, disk, size):
    spec = sandbox(memory_mib=memory, disk_mib=disk)
    assert tmpfs_bytes(spec) == size * MIB
    assert tmpfs_bytes(spec) + shm_bytes(spec) <= memory * MIB * 3 // 4
    assert log_bytes(spec) <= max(4 * MIB, memory * MIB // 16)


def made(spec, layer, **changes):
    values = {
        "compiled": compiled(), "rootfs": Path("/r"), "layer": layer, "uid_base": 1 << 28,
        "runtime_dir": Path("/d/run"), "resolvers": ("10.0.0.1",),
    }  # fmt: skip
    return compose(spec, **(values | changes))


def test_composition():
    container = made(sandbox(hostname=""), UpperLayer(kind="tmpfs", name="x"))
    assert isinstance(container.upper, TmpfsUpper)
    assert container.hostname == "sb-n1-abc"
    assert container.nameservers == ()
    assert container.socket_path == Path("/d/run/sb-n1-abc.3.sock")
    opened = made(sandbox(), UpperLayer(kind="btrfs", name="x", path="/u/x"), compiled=compiled({"network": "open"}))
    assert opened.upper == DirUpper(path=Path("/u/x"))
    assert opened.nameservers == ("10.0.0.1",)


def test_records_survive_the_journal():
    record = Record(
        boot_id="b", launcher="native", digest="sha256:0", uid_base=65536, socket="/d/run/x.sock",
        cgroup={"name": "c1", "baseline": {}}, net={"kind": "none"}, upper={"kind": "tmpfs", "name": "x"},
    )  # fmt: skip
    handle = record.to_handle("sb-n1-abc", 3)
    assert read_record(handle) == record
    assert owner_label(handle) == "sb-n1-abc#3"


@pytest.mark.parametrize(
    "changes", [{"backend": "vm"}, {"version": 99}, {"data": {}}, {"data": {"boot_id": "x", "uid_base": "nine"}}]
)
def test_handles_of_others_are_refused(changes):
    values = {"version": 1, "backend": "container", "sandbox": "sb-n1-abc", "incarnation": 1, "data": {}}
    with pytest.raises(PlatformError, match="bad_handle"):
        read_record(Handle(**(values | changes)))
