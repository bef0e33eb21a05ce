"""A node without the image that a create names, and a shared store that has it: its data comes when it is read."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from dsec_imagefs import ImageStore
from dsec_imagefs.blobd import BlobClient
from dsec_imagefs.remote import Remote

from nomad_dsec.backends.container.host import STALE_AFTER_S
from tests.kit.abilities import needs
from tests.kit.node_daemon import CONTAINER_NEEDS, NodeDaemon

pytestmark = [needs(*CONTAINER_NEEDS, "fuse"), pytest.mark.timeout(120)]


@pytest.fixture
def daemon(tmp_path):
    (tmp_path / "shared").mkdir()
    url = f"dir:{tmp_path / 'shared'}"
    made = NodeDaemon(tmp_path, backend="container", flags=("--image-store", url))
    made.images.rename(tmp_path / "builder")
    Remote(store=ImageStore(tmp_path / "builder"), url=url).push(made.image)
    made.start()
    yield made
    made.remove()
    assert not BlobClient(made.images).is_running()  # it goes with the last mount


async def test_a_create_brings_what_it_needs_from_the_shared_store(daemon, tmp_path):
    digest = ImageStore(tmp_path / "builder").resolve(daemon.image).digest
    async with daemon.client() as client:
        listed = (await client.call("GET", "/v1/images")).ok()["images"]
        assert [(image["digest"], image["names"]) for image in listed] == [(digest, ["small:latest"])]
        assert ImageStore(daemon.images).ls() == []
        first, second = await client.create(2)
        for sandbox in (first, second):
            assert (await client.exec(sandbox["id"], "echo alive"))["stdout"] == "YWxpdmUK"
        (image,) = ImageStore(daemon.images).ls()
        assert (image.digest, image.names) == (digest, ("small:latest",))
        (row,) = BlobClient(daemon.images).stats()["blobs"]
        assert row["present_bytes"] > 0
        daemon.kill9()  # sandboxes and their data outlive the daemon
    daemon.start()
    async with daemon.client() as client:
        assert (await client.exec(first["id"], "cat /etc/passwd"))["exit_code"] == 0
        refused = await client.call("POST", "/v1/sandboxes", client.body(daemon.new_ids(), image="nowhere"))
        assert refused.error["code"] == "image_missing"


async def test_a_store_that_is_away_hinders_only_what_needs_it(daemon, tmp_path):
    async with daemon.client() as client:
        (sandbox,) = await client.create()
        assert (await client.exec(sandbox["id"], "echo alive"))["stdout"] == "YWxpdmUK"
        (tmp_path / "shared").rename(tmp_path / "away")
        refused = await client.call("POST", "/v1/sandboxes", client.body(daemon.new_ids(), image="nowhere"))
        assert refused.status >= 400
        assert (await client.exec(sandbox["id"], "echo alive"))["stdout"] == "YWxpdmUK"
        (tmp_path / "away").rename(tmp_path / "shared")


async def test_a_blob_server_killed_whole_costs_new_sandboxes_nothing(daemon):
    async with daemon.client() as client:
        (first,) = await client.create()
        status = BlobClient(daemon.images).status()
        for pid in [value for key, value in status.items() if "pid" in key and isinstance(value, int)]:
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(STALE_AFTER_S)
        (second,) = await client.create()
        assert (await client.exec(second["id"], "cat /etc/passwd; echo alive"))["exit_code"] == 0
        assert first["id"] != second["id"]
