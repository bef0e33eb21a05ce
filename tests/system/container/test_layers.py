"""Writable layers on disk and host directories shown inside: what the pools of a test machine rarely offer."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace

import pytest
from libdsec.errors import PlatformError

from nomad_dsec.backends.container.spec import DirUpper, HostMount
from tests.kit.abilities import needs

pytestmark = [
    needs("root", "erofs", "overlay", "userns", "netns", "cgroup", "filters", "cc"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.leaks_ok,  # the module's backend keeps its pools; the contract suite takes the census
]


@contextmanager
def composed(backend, **changes):
    """Containers of this backend get these fields; a callable is given the spec."""
    plain = backend._compose

    def compose(*args):
        spec = plain(*args)
        return replace(spec, **{key: value(spec) if callable(value) else value for key, value in changes.items()})

    backend._compose = compose
    try:
        yield
    finally:
        backend._compose = plain


def layer_on_disk(directory):
    def make(spec):
        for name in ("upper", "work"):
            path = directory / name
            path.mkdir()
            os.chown(path, spec.uid_base, spec.uid_base)
        return DirUpper(path=directory)

    return make


async def test_a_layer_on_disk_keeps_what_was_written(machine, image, tmp_path):
    with composed(machine.backend, upper=layer_on_disk(tmp_path)):
        async with machine.sandbox(image) as box:
            assert await box.shell("echo kept > /work/file; rm /etc/group; cat /work/file") == "kept"
            base = box.started.handle.data["uid_base"]
    kept = tmp_path / "upper/work/file"
    assert kept.read_text() == "kept\n"
    assert kept.stat().st_uid == base
    assert (tmp_path / "upper").stat().st_mode & 0o7777 == 0o755  # the image's root's


async def test_host_directories_are_shown_where_asked(machine, image, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/file").write_text("shown\n")
    (tmp_path / "one").write_text("a file\n")
    (tmp_path / "data").chmod(0o777)
    mounts = (
        HostMount(source=tmp_path / "data", target="/srv/data"),
        HostMount(source=tmp_path / "one", target="/etc/one.conf"),
        HostMount(source=tmp_path / "data", target="/mnt/rw", read_only=False),
    )
    with composed(machine.backend, mounts=mounts):
        async with machine.sandbox(image) as box:
            assert await box.shell("cat /srv/data/file /etc/one.conf") == "shown\na file"
            assert "Read-only" in await box.shell("(echo x > /srv/data/new) 2>&1")
            assert await box.shell("echo x > /mnt/rw/new && cat /srv/data/new") == "x"
            assert str(tmp_path) not in await box.shell("cat /proc/self/mounts")


async def test_sockets_and_devices_of_the_host_are_no_mounts(machine, image, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    before = set(machine.backend._host.cgroups.names())
    with (
        composed(machine.backend, mounts=(HostMount(source=tmp_path / "pipe", target="/mnt/p"),)),
        pytest.raises(PlatformError) as caught,
    ):
        async with machine.sandbox(image):
            pass
    assert caught.value.details["step"] == "bind"
    assert set(machine.backend._host.cgroups.names()) - before <= machine.backend._host.cgroup_pool.idle_names()
