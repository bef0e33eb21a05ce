"""Stateless calls through the gateway on fake nodes: passed on whole, placed, retried elsewhere, cancelled, shared."""

from __future__ import annotations

import asyncio
import base64

import msgspec
import pytest
from libdsec.client import AsyncClient
from libdsec.errors import CapacityError, DeniedError, NotFoundError, PlatformError, StateError, UsageError
from libdsec.fncall import AsyncFnCall
from libdsec.wire_fncall import FnResult, FnTest

from tests.kit.fakenode import DIGEST, IMAGE, cut
from tests.kit.fnnode import FnNode
from tests.kit.gateways import calling, running_gateway, tenant_key
from tests.kit.scriptedgateway import always, cutting, refusal, scripted


@pytest.fixture
async def nodes():
    async with FnNode("n1") as one, FnNode("n2") as two:
        yield one, two


@pytest.fixture
async def gateway(tmp_path, nodes):
    async with running_gateway(tmp_path / "gw", *nodes) as gateway:
        yield gateway


@pytest.fixture
async def admin(gateway):
    async with calling(gateway) as caller:
        yield caller


@pytest.fixture
async def client(gateway, admin):
    async with AsyncClient(gateway.address, await tenant_key(admin, "team-a"), reconnect_s=2.0) as client:
        yield client


async def _call(client, code, **more):
    return await AsyncFnCall.run(code, image=IMAGE, language="python", client=client, **more)


async def test_a_call_reaches_a_node_whole_and_its_result_comes_back(client, nodes):
    result = await _call(client, "cat", stdin=b"\xff\0in", files={"a.txt": "x"}, limits={"cpu_s": 1.5}, clean=True)
    assert (result.verdict, result.stdout_bytes, result.stdout) == ("accepted", b"\xff\0in", "\ufffd\0in")
    ((namespace, digest, asked),) = nodes[0].seen + nodes[1].seen
    assert (namespace, digest) == ("team-a", DIGEST)
    assert (asked.files, asked.limits.cpu_s, asked.clean) == ({"a.txt": b"x"}, 1.5, True)
    assert asked.call_id


async def test_how_a_program_ended_is_a_result(client):
    ends = [await _call(client, code) for code in ("exit 7", "signal 11", "spin", "broken")]
    told = [(end.verdict, end.exit_code, end.signal) for end in ends]
    assert told == [
        ("runtime_error", 7, None),
        ("runtime_error", None, 11),
        ("cpu_time_limit", None, 9),
        ("internal_error", None, None),
    ]
    assert (ends[0].queue_s, ends[0].wall_s) == (0.5, 0.25)


async def test_a_submission_is_judged_by_its_tests(client):
    tests = [{"stdin": "1", "expected": "1", "name": "one"}, FnTest(stdin=b"2", expected=b"3"), {"stdin": "4"}]
    judged = await AsyncFnCall.submit("cat", tests=tests, image=IMAGE, language="python", client=client)
    assert (judged.verdict, judged.passed, judged.total) == ("wrong_answer", 2, 3)
    assert [test.verdict for test in judged.tests] == ["accepted", "wrong_answer", "accepted"]
    assert judged.tests[0].name == "one"
    stopped = await AsyncFnCall.submit(
        "cat", tests=tests, image=IMAGE, language="python", stop_at_first=True, client=client
    )
    assert (len(stopped.tests), stopped.total) == (2, 3)


async def test_the_languages_of_an_image(client):
    assert [(found.name, found.available) for found in await AsyncFnCall.languages(IMAGE, client=client)] == [
        ("python", True)
    ]


async def test_a_node_that_refuses_or_dies_is_passed_over(client, nodes):
    one, two = nodes
    one.refuse_calls = CapacityError("queue_full", "full", retry_after_s=0.2)
    results = [await _call(client, f"print {number}") for number in range(10)]
    assert [result.stdout for result in results] == [str(number) for number in range(10)]
    assert len(two.seen) == 10
    one.refuse_calls = None

    async def die(request):
        await request.read()
        cut(request)
        raise ConnectionResetError

    two.script["POST /v1/fncall"] = die
    results = [await _call(client, f"print {number}") for number in range(10)]
    assert [result.stdout for result in results] == [str(number) for number in range(10)]
    assert len(one.seen) == 10


async def test_when_all_are_full_the_caller_learns_it_with_a_hint(client, nodes):
    for node in nodes:
        node.refuse_calls = CapacityError("queue_full", "full", retry_after_s=0.05)
    with pytest.raises(CapacityError) as caught:
        await _call(client, "print 1", queue_timeout_s=0.2)
    assert (caught.value.code, caught.value.retry_after_s) == ("queue_full", 0.05)

    async def make_room():
        await asyncio.sleep(0.1)
        nodes[0].refuse_calls = None

    task = asyncio.create_task(make_room())
    assert (await _call(client, "print 2", queue_timeout_s=20)).stdout == "2", "the SDK asks again while it may wait"
    await task


async def test_what_no_node_has_is_said_before_a_node_is_asked(client, nodes):
    with pytest.raises(NotFoundError) as caught:
        await AsyncFnCall.run("print 1", image="debain:12", language="python", client=client)
    assert "debian:12" in caught.value.hint
    assert not nodes[0].seen + nodes[1].seen


async def test_no_node_with_the_backend_is_a_refusal_with_reasons(tmp_path):
    async with FnNode("n1") as node:
        node.offers = node.offers[:1]
        async with running_gateway(tmp_path / "g", node) as gateway, calling(gateway) as caller:
            error = await caller.error("POST", "/v1/fncall", {"image": IMAGE, "code": "x", "language": "python"})
    assert (error.code, error.details["refusals"]) == ("no_node", {"backend_unavailable": 1})


async def test_a_caller_that_goes_away_cancels_its_call(client, nodes):
    nodes[1].draining = True
    await asyncio.sleep(0.2)
    task = asyncio.create_task(_call(client, "wait", call_id="gone"))
    await nodes[0].arrived.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(5):
        while nodes[0].cancelled != ["gone"]:
            await asyncio.sleep(0.01)
    assert nodes[0].running == 0


async def test_a_call_is_cancelled_by_id_and_only_within_its_namespace(client, gateway, admin, nodes):
    task = asyncio.create_task(_call(client, "wait", call_id="mine"))
    async with asyncio.timeout(5):
        while not nodes[0].running + nodes[1].running:
            await asyncio.sleep(0.01)
    other = await tenant_key(admin, "team-b")
    async with AsyncClient(gateway.address, other) as stranger:
        await AsyncFnCall.cancel("mine", client=stranger)
        assert nodes[0].running + nodes[1].running == 1
    await AsyncFnCall.cancel("mine", client=client)
    await AsyncFnCall.cancel("never-there", client=client)
    with pytest.raises(StateError, match="cancelled"):
        await task


async def test_many_finish_in_any_order_and_are_bounded(client, nodes):
    requests = (
        AsyncFnCall.request("wait" if number == 0 else f"print {number}", image=IMAGE, language="python")
        for number in range(50)
    )
    seen = []
    async for outcome in AsyncFnCall.run_many(requests, in_flight=8, client=client):
        seen.append(outcome.index)
        if len(seen) == 49:
            for node in nodes:
                node.release.set()
        assert outcome.get().verdict == "accepted"
    assert sorted(seen) == list(range(50))
    assert seen[-1] == 0, "the first was the last to finish, and held up none"
    assert nodes[0].most_running + nodes[1].most_running <= 16
    assert max(nodes[0].most_running, nodes[1].most_running) <= 8


async def test_many_ended_early_leave_nothing_under_way(client, nodes, gateway):
    async def forever():
        number = 0
        while True:
            number += 1
            yield AsyncFnCall.request("wait", image=IMAGE, language="python")

    outcomes = AsyncFnCall.run_many(forever(), in_flight=5, client=client)
    first = asyncio.ensure_future(anext(outcomes))
    async with asyncio.timeout(5):
        while nodes[0].running + nodes[1].running < 5:
            await asyncio.sleep(0.01)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await outcomes.aclose()
    async with asyncio.timeout(5):
        while nodes[0].running + nodes[1].running or gateway.calls.under_way:
            await asyncio.sleep(0.01)


async def test_a_fault_of_one_call_ends_no_other(client):
    requests = [
        AsyncFnCall.request("print 1", image=IMAGE, language="python"),
        AsyncFnCall.request("print 1", image=IMAGE, language="rust"),
        AsyncFnCall.request("print 3", image=IMAGE, language="python"),
    ]
    outcomes = [outcome async for outcome in AsyncFnCall.run_many(requests, client=client)]
    by_index = {outcome.index: outcome for outcome in outcomes}
    assert by_index[0].get().stdout == "1"
    assert by_index[2].get().stdout == "3"
    with pytest.raises(UsageError, match="rustc"):
        by_index[1].get()


async def test_an_error_of_the_callers_own_iterable_is_raised(client):
    def broken():
        yield AsyncFnCall.request("print 1", image=IMAGE, language="python")
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        async for _ in AsyncFnCall.run_many(broken(), in_flight=1, client=client):
            pass


async def test_shares_over_http(tmp_path, nodes):
    async with (
        running_gateway(tmp_path / "shared", *nodes, fncall_inflight_max=4) as gateway,
        calling(gateway) as admin,
        AsyncClient(gateway.address, await tenant_key(admin, "a"), reconnect_s=0) as a,
        AsyncClient(gateway.address, await tenant_key(admin, "b"), reconnect_s=0) as b,
    ):
        held = [asyncio.create_task(_call(a, "wait", queue_timeout_s=0.01)) for _ in range(8)]
        async with asyncio.timeout(5):
            while sum(task.done() for task in held) < 4:
                await asyncio.sleep(0.01)
        refused = [task.exception() for task in held if task.done()]
        assert {error.code for error in refused} == {"busy"}
        assert (await _call(b, "print b")).stdout == "b", "the other namespace is served at once"
        for node in nodes:
            node.release.set()
        ends = await asyncio.gather(*held, return_exceptions=True)
        assert sum(not isinstance(end, CapacityError) and end.accepted for end in ends) == 4


async def test_100_mb_of_stdin_arrive(client, nodes):
    data = b"0123456789abcdef" * (100 * 1024 * 1024 // 16)
    result = await _call(client, "print ok", stdin=data)
    assert result.stdout == "ok"
    ((_, _, asked),) = nodes[0].seen + nodes[1].seen
    assert asked.stdin == data


async def test_bad_requests_name_the_field(admin, client):
    with pytest.raises(UsageError) as caught:
        await _call(client, "x", limits={"cpu_s": -1})
    assert caught.value.field == "limits.cpu_s"
    with pytest.raises(UsageError) as caught:
        await AsyncFnCall.run("x", image=IMAGE, client=client)
    assert caught.value.field == "language"
    with pytest.raises(UsageError) as caught:
        await AsyncFnCall.submit("x", tests=[], image=IMAGE, language="python", client=client)
    assert caught.value.field == "tests"
    for body in (b"{", b"[]", b'{"x":' + b"[" * 100_000, msgspec.json.encode({"image": 3})):
        async with admin.session.post("/v1/fncall", data=body) as reply:
            assert reply.status == 400
    error = await admin.error("POST", "/v1/fncall", {"image": IMAGE, "code": "x", "langauge": "python"})
    assert error.field == "langauge"
    assert (await admin.error("GET", "/v1/fncall/languages")).field == "image"


async def test_without_a_key_nothing_is_run(gateway, nodes):
    async with calling(gateway, "dsk_wrong") as stranger:
        body = {"image": IMAGE, "code": base64.b64encode(b"x").decode(), "language": "python"}
        for path in ("/v1/fncall", "/v1/fncall/submit", "/v1/fncall/cancel"):
            status, _ = await stranger("POST", path, body)
            assert status == 401
    assert not nodes[0].seen + nodes[1].seen


def test_the_sync_twin(tmp_path):
    """In a process without a loop of its own, as training jobs are: the gateway and node run in a thread."""
    import threading

    from libdsec import _loop
    from libdsec.sync import Client, FnCall

    ready: dict[str, object] = {}
    started, stop = threading.Event(), threading.Event()

    async def serve():
        async with FnNode("n1") as node, running_gateway(tmp_path / "g", node) as gateway:
            ready["address"] = gateway.address
            started.set()
            while not stop.is_set():
                await asyncio.sleep(0.02)

    from tests.kit.gateways import ADMIN

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(20)
        with Client(str(ready["address"]), ADMIN) as client:
            assert FnCall.run("print 5", image=IMAGE, language="python", client=client).stdout == "5"
            requests = [FnCall.request(f"print {n}", image=IMAGE, language="python") for n in range(5)]
            outcomes = sorted(FnCall.run_many(requests, client=client), key=lambda outcome: outcome.index)
            assert [outcome.get().stdout for outcome in outcomes] == list("01234")
            judged = FnCall.submit("cat", tests=[{"stdin": "1"}], image=IMAGE, language="python", client=client)
            assert judged.accepted
    finally:
        stop.set()
        thread.join(20)
        _loop.stop()


async def test_a_cut_connection_is_outlasted():
    reply = FnResult(verdict="accepted", exit_code=0, stdout=b"1\n")
    async with scripted() as (gateway, client):
        gateway.on("POST /v1/fncall", cutting(), cutting(after_read=False), always(reply))
        assert (await _call(client, "print(1)")).stdout == "1\n"
        assert gateway.count("POST /v1/fncall") == 3


async def test_a_fault_that_stays_is_raised():
    refusals = (refusal("platform", "internal_error", 500), refusal("denied", "bad_key", 401))
    for refused, kind in zip(refusals, (PlatformError, DeniedError), strict=True):
        async with scripted() as (gateway, client):

            async def handler(request, refused=refused):
                await request.read()
                return refused

            gateway.on("POST /v1/fncall", handler)
            with pytest.raises(kind):
                await _call(client, "print(1)")
            assert gateway.count("POST /v1/fncall") == 1


async def test_a_body_of_untold_length_must_be_short(admin):
    async def body(size):
        yield msgspec.json.encode({"image": IMAGE, "code": "print " + "x" * size, "language": "python"})

    async with admin.session.post("/v1/fncall", data=body(10)) as reply:
        assert reply.status == 200
    async with admin.session.post("/v1/fncall", data=body(5_000_000)) as reply:
        assert (reply.status, (await reply.json())["error"]["code"]) == (400, "body_too_large")
