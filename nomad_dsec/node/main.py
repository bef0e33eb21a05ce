"""The node daemon as a process: flags, one event loop, a stop that leaves the sandboxes to the next daemon."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import resource
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop
from libdsec.errors import DsecError, UsageError

from nomad_dsec import config
from nomad_dsec.cluster.configured import check_consul
from nomad_dsec.cluster.references import resolve_settings
from nomad_dsec.ids import check_node
from nomad_dsec.log import get_log, setup_logging
from nomad_dsec.node.assemble import Assembled, assemble, build_node, open_data
from nomad_dsec.node.core import TaskRoom
from nomad_dsec.node.server import listen, load_token

if TYPE_CHECKING:
    from nomad_dsec.httpd import Running
    from nomad_dsec.node.core import Node

log = get_log(__name__)
END_ALL_S = 60.0
FILES_MAX = 262_144


class Announcement(msgspec.Struct, kw_only=True):
    """<data>/node.json and the one line on stdout: how to reach the daemon. The token is in <data>/token."""

    node: str
    pid: int
    http: str
    unix: str = ""


async def serve(settings: config.Settings, *, kill_on_exit: bool, stop: asyncio.Event) -> None:
    """Run until `stop` is set. Raises DsecError when it can't start."""
    data = Path(settings["node.data"])
    if settings["node.id"]:
        check_node(settings["node.id"])  # before anything is made
    await check_consul(settings, "node")
    lock = open_data(data)
    try:
        async with TaskRoom() as room:
            node = await build_node(settings.section("node"), room)
            try:
                await _serve(node, settings, kill_on_exit=kill_on_exit, stop=stop)
            finally:
                node.ready = False
                await room.close()
                for backend in node.backends.values():
                    await backend.close()
                await asyncio.to_thread(node.journal.close)
    finally:
        os.close(lock)


async def _serve(node: Node, settings: config.Settings, *, kill_on_exit: bool, stop: asyncio.Event) -> None:
    parts = await assemble(node)
    try:
        await _serve_parts(node, parts, settings, kill_on_exit=kill_on_exit, stop=stop)
    finally:
        await parts.lanes.close()


async def _serve_parts(
    node: Node, parts: Assembled, settings: config.Settings, *, kill_on_exit: bool, stop: asyncio.Event
) -> None:
    doors = await listen(
        parts.routes,
        local=parts.task_routes.table(),
        data=node.data,
        host=settings["node.host"],
        port=settings["node.port"],
        token=load_token(node.data, settings["node.token"]),
    )
    announce(parts, doors, node.data)
    async with AsyncExitStack() as stack:
        if settings["consul.address"]:
            from nomad_dsec.node.presence import in_consul  # brings Consul's client along: 5 MB and 0.1 s

            await stack.enter_async_context(in_consul(parts, settings))
        await stop.wait()
    log.info("the node daemon ends", node=node.id, kill_on_exit=kill_on_exit)
    await asyncio.gather(*(door.close(timeout_s=2.0) for door in doors))
    if kill_on_exit:
        await end_all(parts)


def announce(parts: Assembled, doors: list[Running], data: Path) -> None:
    """Tell where the daemon listens, atomically, once it is ready."""
    parts.fingerprint.address = doors[-1].address
    parts.node.ready = True
    facts = Announcement(
        node=parts.node.id,
        pid=os.getpid(),
        http=doors[-1].address,
        unix=doors[0].address if len(doors) > 1 else "",
    )
    text = msgspec.json.encode(facts)
    fresh = data / "node.json.new"
    fresh.write_bytes(text)
    fresh.replace(data / "node.json")
    sys.stdout.write(text.decode() + "\n")
    sys.stdout.flush()
    # What is alive now lives for long; without it each full collection is a pause of many milliseconds.
    gc.collect()
    gc.freeze()
    log.info("the node daemon serves", node=facts.node, http=facts.http, unix=facts.unix)


async def end_all(parts: Assembled) -> None:
    """End every sandbox, for a daemon that is told to leave nothing."""
    ends = [parts.door.end(entry, reason="killed", message="the node daemon ended") for entry in parts.node.live()]
    async with asyncio.timeout(END_ALL_S):
        for result in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(result, BaseException):
                log.error("a sandbox outlives the daemon", error=repr(result))


async def run(settings: config.Settings, *, kill_on_exit: bool) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    await serve(settings, kill_on_exit=kill_on_exit, stop=stop)


def raise_file_limit() -> None:
    """Thousands of sandboxes hold a few descriptors each; root may raise the hard limit too, setrlimit(2)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (max(hard, FILES_MAX), hard):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
        except (ValueError, OSError):
            continue
        return
    log.warning("the limit on open files stays low", soft=soft, hard=hard)


def parser() -> argparse.ArgumentParser:
    """The command line; `dsec node run` shares it."""
    made = argparse.ArgumentParser(prog="dsec node run", description="Run the node daemon.")
    config.add_flags(made, ["node", "consul", "vault", "log"])
    made.add_argument("--node-id", dest="node.id", metavar="STR", help="the same as --id")
    made.add_argument("--kill-on-exit", action="store_true", help="end all sandboxes when the daemon is stopped")
    return made


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 stopped as told, 1 fault, 2 usage."""
    args: dict[str, Any] = vars(parser().parse_args(argv))
    kill_on_exit = bool(args.pop("kill_on_exit"))
    try:
        settings = resolve_settings(config.from_args(argparse.Namespace(**args)), "node")
        setup_logging(level=settings["log.level"], json_lines=settings["log.json"])
        raise_file_limit()
        uvloop.run(run(settings, kill_on_exit=kill_on_exit))
    except UsageError as error:
        sys.stderr.write(f"dsec node: {error}\n")
        return 2
    except DsecError as error:
        sys.stderr.write(f"dsec node: {error}\n")
        return 1
    return 0
