"""`python -m nomad_dsec.gateway`: prints one JSON line with its address once it serves; SIGTERM ends it."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from libdsec.errors import DsecError, UsageError

from nomad_dsec.cluster.configured import check_consul
from nomad_dsec.cluster.references import resolve_settings
from nomad_dsec.config import add_flags, from_args
from nomad_dsec.gateway.keys import check_namespace
from nomad_dsec.gateway.secret_refs import open_namespace_secrets
from nomad_dsec.gateway.server import ADMIN_KEY_FILE, Gateway, GatewayOptions, static_source
from nomad_dsec.log import setup_logging

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from nomad_dsec.config import Settings


def options_of(settings: Settings) -> GatewayOptions:
    """The gateway's options from settings; UsageError names the setting."""
    fusion = settings["gateway.fusion_namespace"]
    return GatewayOptions(
        data=Path(settings["gateway.data"]),
        source=static_source(settings["gateway.nodes"]),
        host=settings["gateway.host"],
        port=settings["gateway.port"],
        admin_key=settings["gateway.admin_key"],
        create_inflight_max=settings["gateway.create_inflight_max"],
        fncall_inflight_max=settings["gateway.fncall_inflight_max"],
        fusion_namespace=fusion and check_namespace(fusion),
        fusion_image=settings["gateway.fusion_image"],
        failpoint=settings["gateway.failpoint"],
    )


async def run(settings: Settings) -> None:
    """Serve with these settings. UsageError, DeniedError when what they refer to can't be had."""
    await check_consul(settings, "gateway")
    options = replace(options_of(settings), secrets=await open_namespace_secrets(settings))
    if not settings["consul.address"]:
        await serve(options)
        return
    from nomad_dsec.gateway.presence import in_consul  # brings Consul's client along: 5 MB and 0.1 s

    async with in_consul(settings) as presence:
        await serve(replace(options, source=presence.source), around=presence.registered)


async def serve(
    options: GatewayOptions, *, around: Callable[[Gateway], AbstractAsyncContextManager[None]] | None = None
) -> None:
    """Run until SIGTERM or SIGINT. around: entered when the gateway serves, left before it stops."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with Gateway(options) as gateway:
        ready = {"address": gateway.address, "admin_key_file": str(options.data / ADMIN_KEY_FILE)}
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()
        async with around(gateway) if around is not None else nullcontext():
            await stop.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 ended on request, 1 fault, 2 usage."""
    parser = argparse.ArgumentParser(prog="dsec gateway run", description="Run the gateway.")
    add_flags(parser, ("gateway", "consul", "vault", "log"))
    try:
        settings = resolve_settings(from_args(parser.parse_args(argv)), "gateway")
        setup_logging(level=settings["log.level"], json_lines=settings["log.json"])
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(settings))
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except DsecError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
