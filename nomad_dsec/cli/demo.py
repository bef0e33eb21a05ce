"""`dsec demo`: the guided tour. Runs `dsec dev` on a directory of its own, and stops it at the end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from dsec_imagefs import ImageError, ImageStore
from libdsec.errors import PlatformError
from rich.table import Table

from nomad_dsec.cli.access import add_data
from nomad_dsec.cli.output import add_json, print_json, say
from nomad_dsec.cli.progress import ImportBars, bars, talk
from nomad_dsec.demo.report import render
from nomad_dsec.demo.run import DemoOptions, run_demo
from nomad_dsec.dev import control
from nomad_dsec.dev.layout import Layout

if TYPE_CHECKING:
    import argparse

    from nomad_dsec.demo.outcome import Outcome

DEFAULT_DATA = Path("/var/lib/dsec-demo")
IMAGE = "debian-dev"
SUITE = "bookworm"
PACKAGES = "python3,python3-pytest,gcc,git,ca-certificates,procps,gdb,make,g++"


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `dsec demo`."""
    add_data(parser, str(DEFAULT_DATA))
    parser.add_argument("--images", type=Path, default=None, metavar="DIR", help="image store (default: <data>/images)")
    parser.add_argument("--image", default="", help=f"default: {IMAGE}, built by debootstrap when missing")
    parser.add_argument("--report", type=Path, default=Path("demo-report"), metavar="DIR", help="where the report goes")
    parser.add_argument("--groups", type=int, default=4, help="how many tasks, each with a group of rollouts")
    parser.add_argument("--size", type=int, default=8, help="rollouts in a group")
    parser.add_argument("--submissions", type=int, default=250, help="programs to judge; 0: leave that stage out")
    parser.add_argument("--no-crash", action="store_true", help="leave the node daemon alone")
    add_json(parser)
    parser.set_defaults(run=run)


async def run(args: argparse.Namespace) -> int:
    """Image, dev, stages, report.

    Exit code 1 when a sandbox was lost or left over, a rollout had to be masked, or a submission was judged wrongly.
    """
    layout = Layout((args.data or DEFAULT_DATA).absolute())
    layout.prepare()
    images = (args.images or layout.images).absolute()
    image = await asyncio.to_thread(_image, images, args.image)
    say("starting dsec dev ...")
    state = await control.start_detached(layout, ["dev", "run", "--data", str(layout.data), "--images", str(images)])
    try:
        with bars() as progress:
            options = DemoOptions(
                image=image,
                groups=args.groups,
                size=args.size,
                submissions=args.submissions,
                crash=not args.no_crash,
            )
            outcome = await run_demo(layout, state, options, progress)
    finally:
        say("stopping dsec dev ...")
        await control.stop(layout, keep=False)
    args.report.mkdir(parents=True, exist_ok=True)
    page = args.report / "index.html"
    page.write_text(render(outcome), "utf-8")
    _tell(outcome, page, as_json=args.json)
    astray = outcome.judging.astray if outcome.judging is not None else []
    return 1 if outcome.lost or outcome.left_over or outcome.faults or astray else 0


def _image(store_path: Path, wanted: str) -> str:
    """The image to use, built when it is the default one and missing."""
    try:
        store = ImageStore(store_path)
        try:
            return store.resolve(wanted or IMAGE).digest
        except ImageError as error:
            if wanted or error.code != "not_found":
                raise
        say(f"building the image {IMAGE} once: {SUITE} with {PACKAGES}; about a minute, kept in {store_path}")
        with ImportBars() as progress:
            return store.import_image(f"debootstrap:{SUITE}?include={PACKAGES}", IMAGE, progress=progress).digest
    except ImageError as error:
        raise PlatformError(error.code, error.message, hint=error.hint, field=error.field) from error


def _tell(outcome: Outcome, page: Path, *, as_json: bool) -> None:
    if as_json:
        print_json({"summary": dict(outcome.summary()), "report": str(page)})
        return
    table = Table(title="dsec demo", show_header=False, title_justify="left")
    for name, value in outcome.summary():
        good = name in {"sandboxes lost", "rollouts masked by faults", "verdicts astray", "left over at the end"}
        table.add_row(name, f"[{'green' if value == '0' else 'bold red'}]{value}" if good else value)
    talk().print(table)
    for rollout in outcome.faults:
        say(f"masked: group {rollout.group + 1}, {rollout.agent}: {rollout.fault}")
    for one in outcome.judging.astray if outcome.judging is not None else ():
        got = one.verdict or one.error
        say(f"astray: {one.submission.title} ({one.submission.language}) got {got}, not {one.submission.verdict}")
    print(page)
