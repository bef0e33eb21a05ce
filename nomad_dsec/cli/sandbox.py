"""`dsec sandbox`: create, ls, info, pause, resume, kill, plan; exec, shell, cp and logs are in files of their own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libdsec.errors import UsageError
from libdsec.sandbox import AsyncSandbox
from libdsec.wire import LIVE_STATES, SandboxInfo

from nomad_dsec.cli import sandbox_cp, sandbox_exec, sandbox_logs
from nomad_dsec.cli.access import add_access, open_client
from nomad_dsec.cli.main import say_error
from nomad_dsec.cli.output import add_json, age, print_json, print_table, say
from nomad_dsec.cli.sandbox_secrets import add_secret_flag, secrets_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Coroutine

    from libdsec.client import AsyncClient

_AT_ONCE = 32
_ID = "of the sandbox, as `dsec sandbox ls` prints it"


def add(parser: argparse.ArgumentParser) -> None:
    """Verbs of `dsec sandbox`."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    _add_create(verbs.add_parser("create", help="make sandboxes and print their ids"))
    ls = verbs.add_parser("ls", help="list sandboxes")
    ls.add_argument("--label", action="append", default=[], metavar="KEY=VALUE", help="only with this; may repeat")
    ls.add_argument("--state", help="only in this state")
    ls.add_argument("--namespace", default="", help="whose; * for all (needs an admin key; default: the key's own)")
    ls.add_argument("--all", action="store_true", help="also those that have ended")
    _finish(ls, run_ls)
    for verb, text, run in (
        ("info", "all that is known of one", run_info),
        ("plan", "the operations that made it", run_plan),
    ):
        one = verbs.add_parser(verb, help=text)
        one.add_argument("sandbox", metavar="ID", help=_ID)
        _finish(one, run)
    for verb, text in (("pause", "freeze"), ("resume", "thaw"), ("kill", "end, and wait until the resources are gone")):
        several = verbs.add_parser(verb, help=text)
        several.add_argument("sandboxes", nargs="*", metavar="ID", help=_ID)
        if verb == "kill":
            several.add_argument("--all", action="store_true", help="every live one that this key sees")
            several.add_argument(
                "--label", action="append", default=[], metavar="KEY=VALUE", help="every live one with it"
            )
        _finish(several, run_each)
    sandbox_exec.add(verbs)
    sandbox_logs.add(verbs)
    sandbox_cp.add(verbs)


def _finish(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], Coroutine[Any, Any, int]]) -> None:
    add_json(parser)
    add_access(parser)
    parser.set_defaults(run=run)


def _add_create(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("image", help="name or digest; see `dsec image ls`")
    parser.add_argument("--count", "-n", type=int, default=1, help="how many")
    parser.add_argument("--some", action="store_true", help="with --count: as many as can be had, not all or none")
    parser.add_argument("--backend", default="container", help="what isolates it (default: %(default)s)")
    parser.add_argument("--cpus", type=float, default=1.0, help="cores, may be a fraction (default: %(default)s)")
    parser.add_argument("--memory-mib", type=int, default=512, help="memory in MiB (default: %(default)s)")
    parser.add_argument("--disk-mib", type=int, default=1024, help="what it may write, in MiB (default: %(default)s)")
    parser.add_argument("--pids", type=int, default=512, help="processes and threads (default: %(default)s)")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="seconds that it lives (default: %(default)g)")
    parser.add_argument(
        "--wait-s", type=float, default=60.0, help="seconds to queue for room or quota (default: %(default)g)"
    )
    parser.add_argument(
        "--env", "-e", action="append", default=[], metavar="KEY=VALUE", help="for its commands; may repeat"
    )
    parser.add_argument(
        "--label", "-l", action="append", default=[], metavar="KEY=VALUE", help="to find it by; may repeat"
    )
    add_secret_flag(parser)
    parser.add_argument("--cwd", default="", help="where commands start (default: the image's)")
    parser.add_argument("--user", default="", help="who runs them: a name or uid, :group (default: the image's)")
    parser.add_argument("--hostname", default="", help="default: the end of its id")
    parser.add_argument("--qos", default="latency_sensitive", help="latency_sensitive or best_effort")
    parser.add_argument("--policy", default="default", help="name of a profile, or @FILE with a JSON mapping")
    parser.add_argument("--idempotency-key", default="", help="the same key gives the same sandboxes")
    _finish(parser, run_create)


async def run_create(args: argparse.Namespace) -> int:
    """Print one id a line; members of a group that failed are named on stderr and make the exit code 3."""
    policy: Any = args.policy
    if policy.startswith("@"):
        try:
            policy = json.loads(Path(policy[1:]).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError("bad_policy", f"{policy[1:]}: {error}", field="--policy") from error
    secrets = await secrets_of(args.secret)
    async with open_client(args) as client:
        group = await AsyncSandbox.create_many(
            args.count,
            args.image,
            all_or_none=not args.some,
            client=client,
            backend=args.backend,
            cpus=args.cpus,
            memory_mib=args.memory_mib,
            disk_mib=args.disk_mib,
            pids=args.pids,
            timeout_s=args.timeout_s,
            wait_s=args.wait_s,
            env=pairs(args.env, "--env"),
            labels=pairs(args.label, "--label"),
            secrets=secrets,
            cwd=args.cwd,
            user=args.user,
            hostname=args.hostname,
            qos=args.qos,
            policy=policy,
            idempotency_key=args.idempotency_key,
        )
    if args.json:
        print_json([sandbox.details for sandbox in group])
    else:
        for sandbox in group:
            print(sandbox.id)
    for failure in group.failures:
        say_error(failure)
    return 3 if group.failures else 0


async def run_ls(args: argparse.Namespace) -> int:
    """List."""
    async with open_client(args) as client:
        found = await AsyncSandbox.list(
            labels=pairs(args.label, "--label"), state=args.state, namespace=args.namespace, client=client
        )
    shown = found if args.all or args.state else [info for info in found if info.state in LIVE_STATES]
    shown.sort(key=lambda info: info.created_at)
    if args.json:
        print_json(shown)
        return 0
    columns = ["id", "state", "image", "backend", "cpus", "memory", "disk", "age", "labels"]
    if not args.namespace:
        print_table(columns, (_row(info) for info in shown))
    else:
        print_table([*columns, "namespace"], ([*_row(info), info.namespace] for info in shown))
    return 0


def _row(info: SandboxInfo) -> list[object]:
    state = f"{info.state}({info.reason})" if info.reason else info.state
    labels = ",".join(f"{key}={value}" for key, value in sorted(info.labels.items()))
    image = info.image if len(info.image) <= 30 else info.image[:29] + "…"
    sizes = [f"{info.cpus:g}", f"{info.memory_mib}M", f"{info.disk_mib}M"]
    return [info.id, state, image, info.backend, *sizes, age(info.created_at), labels]


async def run_info(args: argparse.Namespace) -> int:
    """Everything, as JSON."""
    async with open_client(args) as client:
        print_json((await AsyncSandbox.connect(args.sandbox, client=client)).details)
    return 0


async def run_plan(args: argparse.Namespace) -> int:
    """One operation a line, or JSON."""
    async with open_client(args) as client:
        plan = await (await AsyncSandbox.connect(args.sandbox, client=client)).plan()
    if args.json:
        print_json(plan)
        return 0
    for step in plan:
        name = step.get("op", "?")
        rest = " ".join(f"{key}={value}" for key, value in step.items() if key != "op")
        print(f"{name:16} {rest}".rstrip())
    return 0


async def run_each(args: argparse.Namespace) -> int:
    """The same verb on several sandboxes at once; the worst error decides the exit code."""
    async with open_client(args) as client:
        chosen = await _chosen(args, client)
        gate = asyncio.Semaphore(_AT_ONCE)

        async def one(sandbox_id: str) -> SandboxInfo:
            async with gate:
                sandbox = await AsyncSandbox.connect(sandbox_id, client=client)
                action = {"pause": sandbox.pause, "resume": sandbox.resume, "kill": sandbox.kill}[args.verb]
                return await action()

        done = await asyncio.gather(*(one(sandbox_id) for sandbox_id in chosen), return_exceptions=True)
    infos = [outcome for outcome in done if isinstance(outcome, SandboxInfo)]
    failed = [outcome for outcome in done if isinstance(outcome, BaseException)]
    if args.json:
        print_json(infos)
    else:
        for info in infos:
            print(f"{info.id} {info.state}")
    for error in failed[1:]:
        say(f"dsec: {error}")
    if failed:
        raise failed[0]
    return 0


async def _chosen(args: argparse.Namespace, client: AsyncClient) -> list[str]:
    if args.verb == "kill" and (args.all or args.label):
        found = await AsyncSandbox.list(labels=pairs(args.label, "--label"), client=client)
        return [info.id for info in found if info.state in LIVE_STATES]
    if not args.sandboxes:
        raise UsageError("no_sandbox", "no sandbox is named", field="ID", hint="`dsec sandbox ls` shows them")
    return list(dict.fromkeys(args.sandboxes))


def pairs(texts: list[str], flag: str) -> dict[str, str]:
    """KEY=VALUE texts as a mapping; UsageError names the flag."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError("bad_pair", f"{text!r} is not KEY=VALUE", field=flag)
        found[key] = value
    return found
