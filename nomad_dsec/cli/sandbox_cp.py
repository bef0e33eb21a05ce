"""`dsec sandbox cp`: files and trees between this machine and a sandbox."""

from __future__ import annotations

import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from libdsec.errors import UsageError
from libdsec.sandbox import AsyncSandbox

from nomad_dsec.cli.access import add_access, open_client
from nomad_dsec.cli.output import add_json, print_json, say
from nomad_dsec.ids import SANDBOX_PATTERN

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator

    from libdsec.wire import TreeResult


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb."""
    parser = verbs.add_parser("cp", help="copy a file or a tree in or out; `-` is stdin or stdout")
    parser.add_argument("source", metavar="FROM", help="PATH, ID:PATH or -")
    parser.add_argument("target", metavar="TO", help="PATH, ID:PATH or -")
    add_json(parser)
    add_access(parser)
    parser.set_defaults(run=run)


def split(text: str) -> tuple[str, str]:
    """(sandbox id or "", path)."""
    head, colon, path = text.partition(":")
    if colon and SANDBOX_PATTERN.fullmatch(head):
        return head, path or "/"
    return "", text


async def run(args: argparse.Namespace) -> int:
    """Copy one way; special files are left out and named."""
    (from_id, source), (to_id, target) = split(args.source), split(args.target)
    if bool(from_id) == bool(to_id):
        raise UsageError("bad_copy", "exactly one side must be in a sandbox", field="FROM", hint="name it ID:PATH")
    async with open_client(args) as client:
        sandbox = await AsyncSandbox.connect(from_id or to_id, client=client)
        result = await (_out(sandbox, source, target) if from_id else _in(sandbox, source, target))
    if result is not None and args.json:
        print_json(result)
    for name, why in result.skipped if result is not None else []:
        say(f"left out: {name} ({why})")
    return 0


async def _in(sandbox: AsyncSandbox, source: str, target: str) -> TreeResult | None:
    if source == "-":
        await sandbox.files.write(target, _stdin(), parents=True)
        return None
    if target.endswith("/") and not Path(source).is_dir():
        target = str(PurePosixPath(target) / Path(source).name)
    return await sandbox.files.upload(source, target)


async def _out(sandbox: AsyncSandbox, source: str, target: str) -> TreeResult | None:
    if target == "-":
        async for chunk in sandbox.files.read_stream(source):
            sys.stdout.buffer.write(chunk)
        return None
    local = Path(target)
    if local.is_dir() and (await sandbox.files.stat(source)).kind == "file":
        local = local / PurePosixPath(source).name
    return await sandbox.files.download(source, local)


async def _stdin() -> AsyncIterator[bytes]:
    import asyncio

    while chunk := await asyncio.to_thread(sys.stdin.buffer.read, 256 * 1024):
        yield chunk
