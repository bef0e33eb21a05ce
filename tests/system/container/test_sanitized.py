"""The C launcher under ASan and UBSan, from list to serving: every kind of operation, and lists that fail half-way."""

from __future__ import annotations

import asyncio
import os
import secrets

import pytest
import pytest_asyncio
from libdsec.errors import DsecError

from tests.contract.backend_machines import Room
from tests.kit.abilities import needs
from tests.kit.attacker import build_attacker
from tests.kit.small_image import make_tree

pytestmark = [
    needs("root", "erofs", "overlay", "userns", "netns", "cgroup", "filters", "cc"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.leaks_ok,  # the module's backend keeps its pools; the contract suite takes the census
    pytest.mark.timeout(180),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def room(tmp_path_factory):
    directory = tmp_path_factory.mktemp("room")
    made = Room(launcher="native", directory=directory, node=f"s{os.getpid()}{secrets.token_hex(2)}", sanitize=True)
    await made.open()
    tree = directory / "tree"
    tree.mkdir(mode=0o755)
    make_tree(tree, build_attacker(directory))
    made.digest = made.backend._host.roots._table._store.import_image(f"dir:{tree}", "plain").digest
    try:
        found = await made.backend.fingerprint()
        assert found.available, found.reason
        yield made
    finally:
        await made.close()


@pytest.mark.parametrize(
    "policy",
    [{}, {"profile": "debug"}, {"no_new_privs": False}, {"protected_paths": ["/bin/cat", "/opt/tool/run", "/etc"]}],
    ids=["default", "debug", "suid", "protected"],
)
async def test_every_kind_of_list_is_carried_out(room: Room, policy):
    handle = await room.start(policy=policy, secrets={"token": "x", "other": ""})
    assert await room.shell(handle, "cat /run/secrets/token; echo; cat /etc/hostname") == "x\nbox"
    for path in policy.get("protected_paths", ()):
        target = path if path == "/bin/cat" else "/etc/new"
        assert "Read-only" in await room.shell(handle, f"(echo x >> {target}) 2>&1")
    await room.stop(handle)


async def test_lists_that_fail_are_reported_by_a_process_that_lives_on(room: Room):
    for policy in ({"protected_paths": ["/none"]}, {"protected_paths": ["/bin/" + "x" * 250 + "/y"]}):
        with pytest.raises(DsecError) as caught:
            await room.start(policy=policy)
        assert caught.value.code == "protected_path_missing"
    spawner = room.backend._launcher._spawner
    assert not spawner.ended


async def test_many_at_once_and_cancelled(room: Room):
    tasks = [asyncio.ensure_future(room.start()) for _ in range(8)]
    await asyncio.sleep(0.03)
    for task in tasks[::2]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await room.stop_all()
    assert room.backend._live == {}
    assert not room.backend._launcher._spawner.ended
