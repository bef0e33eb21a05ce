"""`dsec image`: import into this machine's store, list, inspect, verify, remove, collect; layers: image_layers.py."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsec_imagefs import ImageError, ImageStore
from libdsec.errors import PlatformError, UsageError

from nomad_dsec import config
from nomad_dsec.cli import image_layers
from nomad_dsec.cli.access import add_data, layout_of
from nomad_dsec.cli.output import add_json, print_json, print_table, say, size
from nomad_dsec.cli.progress import ImportBars
from nomad_dsec.cluster.registry_logins import auth_file, login_for

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from dsec_imagefs.image import Image

    from nomad_dsec.config import Settings

_USAGE = {"bad_source", "not_found", "ambiguous", "in_use", "bad_name", "unsupported", "bad_store"}


def add(parser: argparse.ArgumentParser) -> None:
    """Verbs of `dsec image`."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    load = verbs.add_parser("import", help="bring an image into the store")
    load.add_argument(
        "source",
        nargs="?",
        help="docker://REF, docker-daemon:REF, docker-archive:FILE, oci:DIR[:TAG], dir:DIR, debootstrap:SUITE; "
        "a layer: tar:FILE",
    )
    load.add_argument("named", nargs="?", metavar="NAME[:TAG]", help="what to call it; the same as --name")
    load.add_argument("--debootstrap", metavar="SUITE", help="build a Debian root of this suite")
    load.add_argument("--include", default="", metavar="PACKAGES", help="more packages for debootstrap, with commas")
    load.add_argument("--name", default=None, metavar="NAME[:TAG]", help="what to call it")
    load.add_argument("--refresh", action="store_true", help="build anew what the cache could give")
    load.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings, such as registry.logins")
    _finish(load, run_import)
    _finish(verbs.add_parser("ls", help="list"), run_ls)
    for words, run in image_layers.parsers(verbs):
        _finish(words, run)
    for verb, text, run in (
        ("inspect", "all that is known of one", run_inspect),
        ("verify", "read all of it and compare the digest", run_verify),
        ("rm", "remove a name, or an image by digest", run_rm),
    ):
        one = verbs.add_parser(verb, help=text)
        one.add_argument("ref", metavar="IMAGE", help="name, digest, or the start of a digest")
        if verb == "rm":
            one.add_argument("--force", action="store_true", help="also when sandboxes use it")
        _finish(one, run)
    collect = verbs.add_parser("gc", help="remove what no name and no sandbox needs")
    collect.add_argument("--cache", action="store_true", help="also the cache of imports")
    _finish(collect, run_gc)


def _finish(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace, ImageStore], int]) -> None:
    parser.add_argument("--store", type=Path, default=None, metavar="DIR", help="the store (default: <data>/images)")
    add_data(parser)
    add_json(parser)
    parser.set_defaults(run=lambda args: _with_store(args, run))


def _with_store(args: argparse.Namespace, run: Callable[[argparse.Namespace, ImageStore], int]) -> int:
    """The border at which errors of the image room become ours."""
    try:
        directory = args.store or layout_of(args).images
        if run not in _MAKERS and not directory.is_dir():  # looking must not make one
            raise UsageError(
                "no_store", f"{directory} is no image store", field="--store", hint="`dsec image import` makes one"
            )
        return run(args, ImageStore(directory))
    except ImageError as error:
        kind = UsageError if error.code in _USAGE else PlatformError
        raise kind(error.code, error.message, hint=error.hint, field=error.field) from error


def run_import(args: argparse.Namespace, store: ImageStore) -> int:
    """Print the digest."""
    source = import_source(args)
    name = args.name or args.named
    settings = config.load(file=args.config)
    with auth_file(_login(source, settings)) as authfile, ImportBars() as bars:
        image = store.import_image(source, name, progress=bars, refresh=args.refresh, authfile=authfile)
    for note in image.notes:
        say(note)
    if not image.names:
        say("it has no name, so `dsec image gc` removes it: import it again with a NAME, which takes no time")
    if args.json:
        print_json(_as_data(image))
    else:
        print(image.digest)
    return 0


def _login(source: str, settings: Settings) -> dict[str, str]:
    """The login of the registry that is asked; {} where none is configured, and skopeo's own places count."""
    rows = settings["registry.logins"]
    if not rows or not source.startswith("docker://"):
        return {}
    from nomad_dsec.cluster.configured import open_secrets  # with Vault's client, which other verbs do not need

    async def look_up() -> dict[str, str]:
        secrets = await open_secrets(settings)
        try:
            return await login_for(source.removeprefix("docker://"), rows, secrets)
        finally:
            await secrets.close()

    return asyncio.run(look_up())


def import_source(args: argparse.Namespace) -> str:
    """SOURCE with what --debootstrap and --include add to it; UsageError where they contradict each other."""
    source: str = args.source or ""
    if args.debootstrap:
        if source:
            raise UsageError("two_sources", "a source and --debootstrap were given", field="--debootstrap")
        source = f"debootstrap:{args.debootstrap}"
    if not source:
        raise UsageError("no_source", "nothing to import is named", field="SOURCE", hint="see dsec image import --help")
    if args.name and args.named and args.name != args.named:
        raise UsageError("two_names", f"both {args.named!r} and {args.name!r} were given", field="--name")
    if args.include:
        if not source.startswith("debootstrap:"):
            raise UsageError("not_debootstrap", f"{source!r} takes no packages", field="--include")
        source += f"{'&' if '?' in source else '?'}include={args.include}"
    return source


def run_ls(args: argparse.Namespace, store: ImageStore) -> int:
    """One image a line."""
    images = store.ls()
    if args.json:
        print_json([_as_data(image) for image in images])
        return 0
    rows = ([", ".join(i.names) or "-", i.digest[:19], size(i.size_bytes), i.files, i.source] for i in images)
    print_table(("names", "digest", "size", "files", "source"), rows)
    return 0


def run_inspect(args: argparse.Namespace, store: ImageStore) -> int:
    """As JSON, with its layers and how much of each is here."""
    image = store.inspect(args.ref)
    print_json(_as_data(image) | {"layers": image_layers.layer_rows(store, image)})
    return 0


def run_verify(args: argparse.Namespace, store: ImageStore) -> int:
    """Say that it is whole, or fail."""
    with ImportBars() as bars:
        image = store.verify(args.ref, bars)
    if args.json:
        print_json({"digest": image.digest, "whole": True})
    else:
        print(f"{image.digest} is whole")
    return 0


def run_rm(args: argparse.Namespace, store: ImageStore) -> int:
    """Print what was removed."""
    removed = store.rm(args.ref, force=args.force)
    if args.json:
        print_json(list(removed))
    else:
        for name in removed:
            print(name)
    return 0


def run_gc(args: argparse.Namespace, store: ImageStore) -> int:
    """Print what was removed."""
    done = store.gc(cache=args.cache)
    if args.json:
        print_json({"images": done.images, "blobs": done.blobs, "freed_bytes": done.freed_bytes})
    else:
        print(f"removed {len(done.images)} images and the data of {len(done.blobs)} layers, {size(done.freed_bytes)}")
    return 0


_MAKERS = (run_import, image_layers.run_build, image_layers.run_pull, image_layers.run_prefetch)


def _as_data(image: Image) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(image)
