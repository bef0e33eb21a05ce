"""Which gateway a command talks to: the flags, then DSEC_ENDPOINT and DSEC_API_KEY, then a running `dsec dev`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from libdsec._settings import ENDPOINT_VARIABLE, KEY_VARIABLE
from libdsec.client import AsyncClient
from libdsec.errors import UsageError

from nomad_dsec.dev.layout import DEFAULT_DATA, Layout

if TYPE_CHECKING:
    import argparse


def add_access(parser: argparse.ArgumentParser) -> None:
    """Give a verb the flags that say where the gateway is."""
    group = parser.add_argument_group("gateway")
    group.add_argument("--endpoint", metavar="URL", help=f"default: {ENDPOINT_VARIABLE}, else a running `dsec dev`")
    group.add_argument("--api-key", metavar="KEY", help=f"default: {KEY_VARIABLE}")
    add_data(group)


def add_data(parser: argparse._ActionsContainer, default: str = f"DSEC_DATA or {DEFAULT_DATA}") -> None:
    """Give a verb --data, the directory of `dsec dev`; `default` is told in the help."""
    parser.add_argument(
        "--data",
        type=Path,
        default=None,
        metavar="DIR",
        help=f"directory of `dsec dev` (default {default})",
    )


def layout_of(args: argparse.Namespace) -> Layout:
    """The layout of the chosen data directory."""
    given = args.data or Path(os.environ.get("DSEC_DATA", "") or DEFAULT_DATA)
    return Layout(Path(given).absolute())


def open_client(args: argparse.Namespace) -> AsyncClient:
    """A client of the gateway that the flags, the environment or dev.json name."""
    endpoint = args.endpoint or (os.environ.get(ENDPOINT_VARIABLE) if args.data is None else None)
    if endpoint:
        return AsyncClient(endpoint, args.api_key, reconnect_s=20.0)
    state = layout_of(args).read_state()
    if state is None or not state.ready:
        raise UsageError(
            "no_endpoint",
            f"no gateway is known, and no `dsec dev` runs on {layout_of(args).data}",
            field="--endpoint",
            hint=f"run `dsec dev`, or set {ENDPOINT_VARIABLE} and {KEY_VARIABLE}",
        )
    return AsyncClient(state.endpoint, args.api_key or state.api_key, reconnect_s=20.0)
