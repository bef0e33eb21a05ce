"""What base.Backend promises, asked of each real backend: one suite, the same answers.

Each test begins and ends with the same census: processes, cgroups, directories, uid ranges, mounts.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal

import pytest
import pytest_asyncio
from libdsec.errors import DsecError, PlatformError, StateError, UsageError

from nomad_dsec.backends.base import Fate, Pausable, Planned, Steps
from nomad_dsec.guest.spec import ExecSpec
from nomad_dsec.model import Handle
from tests.contract.backend_machines import PATH, Room, init_pid, settle
from tests.kit.abilities import needs
from tests.kit.attacker import build_attacker
from tests.kit.small_image import make_tree

pytestmark = [
    needs("root", "erofs", "overlay", "userns", "netns", "cgroup", "filters", "cc"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.leaks_ok,  # the pools of the backend live for the module; each test takes a census of its own
    pytest.mark.timeout(120),
]
LAUNCHERS = ["native", pytest.param("oci:crun", marks=needs("crun"))]
FEW = 20  # pause and resume cycles in an ordinary run; DSEC_LONG=1 makes it the 200 of case L3


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=LAUNCHERS)
async def opened(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("room")
    made = Room(launcher=request.param, directory=directory, node=f"c{os.getpid()}{secrets.token_hex(2)}")
    await made.open()
    tree = directory / "tree"
    tree.mkdir(mode=0o755)
    make_tree(tree, build_attacker(directory))
    made.digest = made.backend._host.roots._table._store.import_image(f"dir:{tree}", "contract").digest
    try:
        found = await made.backend.fingerprint()
        assert found.available, found.reason
        yield made
    finally:
        await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def room(opened: Room):
    await opened.stop(await opened.start())  # the image is mounted and the launcher runs, once and for all
    before = opened.census()
    yield opened
    await opened.stop_all()
    assert await settle(lambda: opened.census() == before), (before, opened.census())


async def test_start_exec_stop(room: Room):
    steps, seen = Steps(), []

    async def journal(handle: Handle) -> None:
        # only its own incarnation's things, which are named before they are made
        seen.append(handle)
        assert not os.path.exists(handle.data["socket"])

    started = await room.backend.start(room.spec(), journal, steps)
    room.handles[started.handle.sandbox] = started.handle
    assert seen
    assert seen[-1] == started.handle
    assert {"image", "policy", "slot", "journal", "launch", "connect", "probe"} <= set(steps.ms)
    assert started.policy["profile"] == "default"
    outcome = await room.run(started.handle, "/bin/bash", "-c", "echo out; echo err >&2; exit 7")
    assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (7, b"out\n", b"err\n")
    await room.stop(started.handle)
    with pytest.raises(StateError):
        await room.backend.connect(started.handle)


async def test_stop_twice_and_of_what_never_was(room: Room):
    handle = await room.start()
    await room.backend.stop(handle)
    await room.backend.stop(handle)
    await asyncio.gather(*(room.backend.stop(handle) for _ in range(3)))


async def test_stops_at_once_end_as_one(room: Room):
    handle = await room.start()
    await asyncio.gather(*(room.backend.stop(handle) for _ in range(5)))


async def test_the_same_id_twice_is_refused(room: Room):
    handle = await room.start()
    with pytest.raises(StateError):
        await room.start(id=handle.sandbox)
    assert await room.shell(handle, "echo alive") == "alive"


async def test_recover_after_all_memory_is_lost(room: Room):
    kept, killed, paused = [await room.start() for _ in range(3)]
    # A program that outlives the daemon, with output that must not be lost meanwhile.
    channel = await room.backend.connect(kept)
    spec = ExecSpec(argv=(b"/bin/bash", b"-c", b"sleep 0.3; echo survived"), env=(PATH,), exec_id="ex-long")
    await channel.exec(spec)
    await room.backend.pause(paused)
    os.kill(init_pid(room, killed), signal.SIGKILL)
    await room.lose()
    await room.open()
    assert (await room.backend.recover(kept)).fate is Fate.RUNNING
    assert (await room.backend.recover(killed)).fate is Fate.EXITED
    assert (await room.backend.recover(paused)).fate is Fate.PAUSED
    channel = await room.backend.connect(kept)
    outcome = await (await channel.attach("ex-long", since=0)).wait(timeout_s=10)
    assert outcome.stdout == b"survived\n"
    assert await room.shell(kept, "echo again") == "again"
    await room.backend.resume(paused)
    assert await room.shell(paused, "echo thawed") == "thawed"
    assert (await room.backend.stats(kept)).pids >= 1


async def test_stop_works_from_the_handle_alone(room: Room):
    running, paused = [await room.start() for _ in range(2)]
    await room.backend.pause(paused)
    await room.lose()
    await room.open()
    await room.stop(running)
    await room.stop(paused)
    assert (await room.backend.recover(running)).fate is Fate.EXITED


async def test_another_boots_handle_is_lost(room: Room):
    handle = await room.start()
    old = Handle(
        version=handle.version, backend=handle.backend, sandbox="sb-x-old", incarnation=1,
        data={**handle.data, "boot_id": "another"},
    )  # fmt: skip
    found = await room.backend.recover(old)
    assert (found.fate, found.reason) == (Fate.LOST, "node_lost")
    await room.backend.stop(old)
    assert await room.shell(handle, "echo alive") == "alive"


async def test_an_old_incarnations_handle_does_not_hurt_its_successor(room: Room):
    first = await room.start()
    await room.backend.stop(first)
    second = await room.start(id=first.sandbox, incarnation=2)  # takes the same cgroup out of the pool
    await room.backend.stop(first)
    assert (await room.backend.recover(first)).fate is Fate.EXITED
    with pytest.raises(StateError):
        await room.backend.connect(first)
    assert await room.shell(second, "echo alive") == "alive"
    await room.lose()
    await room.open()
    await room.backend.stop(first)
    assert (await room.backend.recover(second)).fate is Fate.RUNNING
    assert await room.shell(second, "echo alive") == "alive"


async def test_sweep_removes_what_nobody_owns(room: Room):
    kept, orphan = [await room.start() for _ in range(2)]
    del room.handles[orphan.sandbox]
    await room.lose()
    await room.open()
    await room.backend.recover(kept)
    removed = await room.backend.sweep([kept])
    assert any(orphan.data["cgroup"]["name"] in line for line in removed), removed
    assert await room.shell(kept, "echo alive") == "alive"
    assert not os.path.exists(orphan.data["socket"])
    assert await room.backend.sweep([kept]) == []


async def test_pause_stops_and_resume_goes_on_at_once(room: Room):
    assert isinstance(room.backend, Pausable)
    handle = await room.start()
    cycles = 200 if os.environ.get("DSEC_LONG") else FEW
    for number in range(cycles):
        await room.backend.pause(handle)
        await room.backend.resume(handle)
        assert await room.shell(handle, f"echo {number}") == str(number)


async def test_a_paused_sandbox_stands_still_and_can_be_killed(room: Room):
    handle = await room.start()
    channel = await room.backend.connect(handle)
    await channel.exec(ExecSpec(argv=(b"/bin/bash", b"-c", b"while :; do :; done"), env=(PATH,)))
    await asyncio.sleep(0.2)
    assert (await room.backend.stats(handle)).cpu_s > 0.02
    await room.backend.pause(handle)
    before = (await room.backend.stats(handle)).cpu_s
    await asyncio.sleep(0.2)
    assert (await room.backend.stats(handle)).cpu_s - before < 0.005  # what was running when it froze
    await room.stop(handle)


async def test_out_of_memory_is_counted_and_spares_init(room: Room):
    handle = await room.start()
    outcome = await room.run(handle, "/bin/bash", "-c", 'a=(); while :; do a+=("$(printf %1000000s)"); done')
    assert outcome.signal == signal.SIGKILL, outcome
    assert (await room.backend.stats(handle)).oom_kills >= 1
    assert await room.shell(handle, "echo alive") == "alive"


async def test_a_kill_is_not_an_out_of_memory(room: Room):
    handle = await room.start()
    outcome = await room.run(handle, "/bin/bash", "-c", "kill -9 $$")
    assert outcome.signal == signal.SIGKILL
    assert (await room.backend.stats(handle)).oom_kills == 0


async def test_death_of_init_is_noticed_with_its_reason(room: Room):
    handle = await room.start()
    waiting = asyncio.ensure_future(room.backend.wait_ended(handle))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    os.kill(init_pid(room, handle), signal.SIGKILL)
    ended = await asyncio.wait_for(waiting, 5)
    assert ended.reason == "init_exited"


async def test_a_fork_bomb_meets_its_limit_and_delays_nobody(room: Room):
    handle = await room.start(pids=32)
    channel = await room.backend.connect(handle)
    await channel.exec(ExecSpec(argv=(b"/bin/bash", b"-c", b":(){ :|:& };:"), env=(PATH,), exec_id="ex-bomb"))
    await asyncio.sleep(0.3)
    stats = await asyncio.wait_for(room.backend.stats(handle), 1)
    assert stats.pids <= 32
    await asyncio.wait_for((await room.backend.connect(handle)).ping(), 1)
    await asyncio.wait_for(room.stop(handle), 10)


async def test_a_full_disk_is_enospc_and_nothing_more(room: Room):
    handle = await room.start()
    said = await room.shell(handle, "dd if=/dev/zero of=/work/fill bs=1M count=200 2>&1")
    assert "No space left" in said or "quota exceeded" in said
    assert await room.shell(handle, "rm /work/fill && echo x > /work/y && cat /work/y") == "x"
    assert (await room.backend.stats(handle)).oom_kills == 0


async def test_files_everywhere_leave_memory_to_programs(room: Room):
    """Layer and /dev/shm may lie in memory: full, they must not starve what runs, dsec-init first of all."""
    handle = await room.start(memory_mib=32, disk_mib=64)
    await room.shell(handle, "dd if=/dev/zero of=/dev/shm/f bs=64k; dd if=/dev/zero of=/work/f bs=64k")
    assert await room.shell(handle, "echo alive") == "alive"
    outcome = await room.run(handle, "/bin/bash", "-c", 'a=(); while :; do a+=("$(printf %1000000s)"); done')
    assert outcome.signal == signal.SIGKILL
    assert await room.shell(handle, "echo alive") == "alive"


async def test_programs_are_killed_before_dsec_init(room: Room):
    handle = await room.start()
    scores = await room.shell(handle, "cat /proc/self/oom_score_adj /proc/1/oom_score_adj")
    program, init = map(int, scores.split())
    assert program > init


async def test_inodes_are_bounded(room: Room):
    handle = await room.start(disk_mib=8)
    await room.shell(handle, "cd /work; for i in {1..20000}; do : > f$i || break; done", timeout_s=60)
    count = int(await room.shell(handle, "cd /work; set -- *; echo $#", timeout_s=60))
    assert 100 < count < 20000


async def test_a_cancelled_start_leaves_nothing(room: Room):
    for delay_ms in (0, 1, 2, 4, 8):
        task = asyncio.ensure_future(room.start())
        await asyncio.sleep(delay_ms / 1000)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            room.handles.clear()
        else:
            await room.stop_all()
        assert room.backend._live == {}


async def test_a_failed_start_leaves_nothing_and_says_why(room: Room):
    async def broken(_: Handle) -> None:
        raise PlatformError("journal_failed", "the disk is full")

    with pytest.raises(PlatformError, match="journal_failed"):
        await room.backend.start(room.spec(), broken, Steps())
    with pytest.raises(DsecError) as caught:
        await room.start(digest="sha256:" + "0" * 64)
    assert caught.value.code == "image_missing"
    with pytest.raises(UsageError) as caught:
        await room.start(policy={"protected_paths": ["/no/such/file"]})
    assert caught.value.field == "policy.protected_paths"
    with pytest.raises(UsageError) as caught:
        await room.start(policy={"profil": "debug"})
    assert caught.value.field == "policy.profil"
    room.handles.clear()


async def test_twenty_starts_at_once(room: Room):
    handles = await asyncio.gather(*(room.start() for _ in range(20)))
    assert len({handle.data["uid_base"] for handle in handles}) == 20
    said = await asyncio.gather(*(room.shell(handle, "echo $HOSTNAME-$$; id -u") for handle in handles))
    assert all(line.endswith("0") for line in said)
    await asyncio.gather(*(room.stop(handle) for handle in handles))


async def test_sandboxes_do_not_see_each_other(room: Room):
    one, other = [await room.start() for _ in range(2)]
    await room.shell(one, "echo mine > /work/secret; sleep 30 &")
    assert await room.shell(other, "ls /work") == ""
    pids = (await room.shell(other, "cd /proc; echo [0-9]*")).split()
    assert len(pids) <= 4


async def test_secrets_are_shown_to_this_sandbox_only_and_read_only(room: Room):
    handle = await room.start(secrets={"token": "hunter2"})
    assert "hunter2" not in repr(handle.data)
    assert await room.shell(handle, "cat /run/secrets/token") == "hunter2"
    said = await room.shell(handle, "(echo x > /run/secrets/token) 2>&1; (echo y > /run/secrets/new) 2>&1")
    assert said.count("Read-only file system") == 2 or "Permission denied" in said, said
    assert await room.shell(handle, "cat /run/secrets/token; echo; ls /run/secrets") == "hunter2\ntoken"
    other = await room.start()
    assert "token" not in await room.shell(other, "ls /run/secrets 2>&1")


async def test_secrets_are_the_users_own(room: Room):
    """Mode 0400: the sandbox's user and root inside read them, another user does not."""
    handle = await room.start(secrets={"token": "hunter2"}, user="1000")
    assert await room.shell(handle, "stat -c %a:%u:%g /run/secrets/token") == "400:1000:0"
    assert await room.shell(handle, "cat /run/secrets/token", user="1000") == "hunter2"
    assert await room.shell(handle, "cat /run/secrets/token") == "hunter2"
    assert "Permission denied" in await room.shell(handle, "cat /run/secrets/token 2>&1", user="1001")


async def test_plan_is_data(room: Room):
    assert isinstance(room.backend, Planned)
    ops = room.backend.plan(room.spec(secrets={"token": "hunter2"}))
    assert ops
    assert all(isinstance(op["op"], str) for op in ops)
    assert "hunter2" not in repr(ops)
