"""Calls through a real node daemon: its HTTP, its death, its end."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests.kit.abilities import needs
from tests.kit.node_daemon import CONTAINER_NEEDS, NodeDaemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kit.node_daemon import Client

pytestmark = [needs(*CONTAINER_NEEDS, "cc"), pytest.mark.timeout(240)]
CUT = (aiohttp.ClientError, ConnectionError)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[NodeDaemon]:
    """One over a small image with bash."""
    made = NodeDaemon(tmp_path, backend="container")
    made.start()
    yield made
    made.remove()


async def call(client: Client, *argv: str, **fields: Any) -> dict[str, Any]:
    body = {"image": client.daemon.image, "argv": list(argv), **fields}
    return (await client.call("POST", "/v1/fncall", body)).ok()


def lane_processes(daemon: NodeDaemon) -> list[str]:
    """Pids in any cgroup of this node."""
    return [
        line
        for path in Path("/sys/fs/cgroup").glob(f"**/dsec-{daemon.node}/*/cgroup.procs")
        for line in path.read_text().split()
    ]


async def until(condition: Any, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


async def test_calls_over_http(daemon: NodeDaemon) -> None:
    """Results are data, refusals name the field, ids join, cancels end."""
    async with daemon.client() as client:
        result = await call(client, "bash", "-c", "cat; exit 3", stdin=base64.b64encode(b"\xff\0in").decode())
        assert (result["verdict"], result["exit_code"]) == ("runtime_error", 3)
        assert base64.b64decode(result["stdout"]) == b"\xff\0in"
        for body, field in (
            ({"image": daemon.image}, "language"),
            ({"image": daemon.image, "argv": ["nonesuch"]}, "argv"),
            ({"image": daemon.image, "argv": ["x"], "limits": {"wall_s": -1}}, "limits.wall_s"),
            ({"image": "nonesuch", "argv": ["x"]}, "image"),
        ):
            error = (await client.call("POST", "/v1/fncall", body)).error
            assert error["field"] == field, error
        spin = ("bash", "-c", "while :; do :; done")
        running = asyncio.ensure_future(
            client.call("POST", "/v1/fncall", {"image": daemon.image, "argv": list(spin), "call_id": "s"})
        )
        await asyncio.sleep(0.5)
        assert (await client.call("POST", "/v1/fncall/cancel", {"call_id": "s"})).ok() == {}
        assert (await running).error["code"] == "cancelled"
        languages = (await client.call("GET", "/v1/fncall/languages", image=daemon.image)).ok()["languages"]
        assert {info["name"] for info in languages if info["available"]} == {"bash", "sh"}


async def test_a_client_that_leaves_ends_its_call(daemon: NodeDaemon) -> None:
    """No id is needed for that."""
    async with daemon.client() as client:
        await call(client, "bash", "-c", "true")
        limits = {"cpu_s": 100, "wall_s": 100}
        body = {"image": daemon.image, "argv": ["bash", "-c", "while :; do :; done"], "limits": limits}
        running = asyncio.ensure_future(client.call("POST", "/v1/fncall", body))
        await asyncio.sleep(0.5)

        def spinning() -> bool:
            return any(
                Path(f"/proc/{pid}/comm").read_text() == "bash\n"
                for pid in lane_processes(daemon)
                if Path(f"/proc/{pid}/comm").exists()
            )

        assert spinning()
        running.cancel()
        await until(lambda: not spinning())


async def test_the_daemons_death_is_the_end_of_its_lanes(daemon: NodeDaemon) -> None:
    """SIGKILL in the middle of a call: no process stays, the next daemon finds nothing strange and runs calls."""
    async with daemon.client() as client:
        await call(client, "bash", "-c", "true")
        body = {"image": daemon.image, "argv": ["bash", "-c", "trap '' TERM HUP; sleep 100"]}
        running = asyncio.ensure_future(client.call("POST", "/v1/fncall", body))
        await asyncio.sleep(0.5)
        assert lane_processes(daemon)
        daemon.kill9()
        with pytest.raises(CUT):
            await running
    await until(lambda: not lane_processes(daemon))
    daemon.start()
    async with daemon.client() as client:
        assert await client.metric("dsec_node_orphans_found_total") == 0
        assert (await call(client, "bash", "-c", "echo again"))["verdict"] == "accepted"


async def test_a_stopped_daemon_leaves_nothing(daemon: NodeDaemon) -> None:
    """Its lanes have no one to serve, so they go with it, also in the middle of a call."""
    async with daemon.client() as client:
        await call(client, "bash", "-c", "true")
        body = {"image": daemon.image, "argv": ["bash", "-c", "sleep 100"]}
        running = asyncio.ensure_future(client.call("POST", "/v1/fncall", body))
        await asyncio.sleep(0.5)
        assert daemon.stop() == 0, daemon.log()
        with pytest.raises((*CUT, AssertionError)):
            (await running).ok()
    assert not lane_processes(daemon)
    assert "would not end" not in daemon.log()


async def test_a_draining_node_takes_no_calls(daemon: NodeDaemon) -> None:
    """The gateway then asks another."""
    async with daemon.client() as client:
        await client.call("POST", "/v1/node/drain", {"on": True})
        error = (await client.call("POST", "/v1/fncall", {"image": daemon.image, "argv": ["bash"]})).error
        assert (error["kind"], error["code"]) == ("capacity", "draining")
        await client.call("POST", "/v1/node/drain", {"on": False})
        assert (await call(client, "bash", "-c", "true"))["verdict"] == "accepted"
