"""`dsec image` on layers and shared stores: build, compose, push, pull, mount, record, prefetch, cache."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsec_imagefs import ImageError, MountTable
from libdsec.errors import UsageError

from nomad_dsec.cli.output import print_json, print_table, say, size
from nomad_dsec.cli.progress import ImportBars

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from dsec_imagefs import ImageStore
    from dsec_imagefs.image import Image

    Run = Callable[[argparse.Namespace, ImageStore], int]

_USER = "cli"
_URL = "dir:/PATH, s3://BUCKET/PREFIX?endpoint=URL or oci://REGISTRY/REPOSITORY"


def parsers(verbs: Any) -> Iterator[tuple[argparse.ArgumentParser, Run]]:
    """Each verb's parser and what it runs."""
    build = verbs.add_parser("build", help="make a layer, or an image with that layer on top of others")
    build.add_argument("source", help="a directory, or tar:FILE, or what `import` takes")
    build.add_argument("name", metavar="NAME[:TAG]", help="what to call it")
    build.add_argument("--on", action="append", default=[], metavar="IMAGE", help="what it goes on, the lowest first")
    yield build, run_build
    compose = verbs.add_parser("compose", help="stack the layers of images into a new one; no data is touched")
    compose.add_argument("name", metavar="NAME[:TAG]", help="what to call it")
    compose.add_argument("parts", nargs="+", metavar="IMAGE", help="the lowest first")
    compose.add_argument("--config-of", default="", metavar="IMAGE", help="whose settings; default: the last with any")
    yield compose, run_compose
    push = verbs.add_parser("push", help="publish in a shared store; what it has is not sent")
    push.add_argument("ref", metavar="IMAGE", help="name, digest, or the start of a digest")
    push.add_argument("--to", required=True, metavar="URL", help=_URL)
    push.add_argument("--name", default=None, metavar="NAME[:TAG]", help="default: all its names")
    _add_authfile(push)
    yield push, run_push
    pull = verbs.add_parser("pull", help="bring an image's metadata here; its data comes when it is read")
    pull.add_argument("ref", metavar="IMAGE", help="name or digest in the shared store")
    pull.add_argument("--from", required=True, dest="origin", metavar="URL", help=_URL)
    pull.add_argument("--name", default=None, metavar="NAME[:TAG]", help="what to call it here")
    pull.add_argument("--whole", action="store_true", help="bring all data now")
    _add_authfile(pull)
    yield pull, run_pull
    mount = verbs.add_parser("mount", help="mount an image read-only and print where")
    mount.add_argument("ref", metavar="IMAGE", help="name, digest, or the start of a digest")
    mount.add_argument("--release", action="store_true", help="unmount it again")
    yield mount, run_mount
    record = verbs.add_parser("record", help="record what is read of a pulled image for so long, as a trace")
    record.add_argument("ref", metavar="IMAGE", help="name, digest, or the start of a digest")
    record.add_argument("--seconds", type=float, default=30.0, help="how long (30)")
    record.add_argument("--to", default="", metavar="URL", help="put the trace beside the image there")
    _add_authfile(record)
    yield record, run_record
    prefetch = verbs.add_parser("prefetch", help="fetch what the traces of images name, before it is asked for")
    prefetch.add_argument("refs", nargs="+", metavar="IMAGE", help="names; @FILE has one a line; the first come first")
    prefetch.add_argument("--from", dest="origin", default="", metavar="URL", help="pull those that are not here")
    prefetch.add_argument("--deadline", type=float, default=60.0, metavar="SECONDS", help="how long to wait (60)")
    prefetch.add_argument("--whole", action="store_true", help="all data, with or without a trace")
    _add_authfile(prefetch)
    yield prefetch, run_prefetch
    cache = verbs.add_parser("cache", help="what of pulled images is here, and what fetching cost")
    cache.add_argument("--evict", type=int, default=0, metavar="BYTES", help="free about so much, least used first")
    cache.add_argument("--stop", action="store_true", help="end the blob server when nothing is mounted")
    yield cache, run_cache


def _add_authfile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--authfile", default="", metavar="FILE", help="credentials, containers-auth.json(5)")


def run_build(args: argparse.Namespace, store: ImageStore) -> int:
    """Print the digest."""
    from dsec_imagefs.composing import compose

    with ImportBars() as bars:
        image = store.import_image(args.source, None if args.on else args.name, progress=bars)
        if args.on:
            image = compose(store, [*args.on, image.digest], args.name, progress=bars)
    return _tell_image(args, image)


def run_compose(args: argparse.Namespace, store: ImageStore) -> int:
    """Print the digest."""
    from dsec_imagefs.composing import compose

    return _tell_image(args, compose(store, args.parts, args.name, config_of=args.config_of))


def run_push(args: argparse.Namespace, store: ImageStore) -> int:
    """Print what was sent."""
    from dsec_imagefs.remote import Remote

    with ImportBars() as bars:
        done = Remote(store=store, url=args.to, authfile=args.authfile).push(args.ref, args.name, progress=bars)
    if args.json:
        print_json({"digest": f"sha256:{done.image}", "sent": done.sent, "sent_bytes": done.sent_bytes,
                    "present": done.present})  # fmt: skip
    else:
        say(f"sent {done.sent} objects, {size(done.sent_bytes)}; {done.present} were there")
        print(f"sha256:{done.image}")
    return 0


def run_pull(args: argparse.Namespace, store: ImageStore) -> int:
    """Print the digest."""
    from dsec_imagefs.remote import Remote

    remote = Remote(store=store, url=args.origin, authfile=args.authfile)
    with ImportBars() as bars:
        image = remote.pull(args.ref, args.name, progress=bars)
        if args.whole:
            remote.fetch_whole(image, progress=bars)
    return _tell_image(args, image)


def run_mount(args: argparse.Namespace, store: ImageStore) -> int:
    """Print the directory; with --release what was unmounted."""
    table = MountTable(store, store.root / "mounts")
    image = store.resolve(args.ref)
    if args.release:
        table.release(image.digest, _USER)
        gone = table.close()
        if args.json:
            print_json(list(gone))
        return 0
    path = table.acquire(image.digest, _USER)
    if args.json:
        print_json({"digest": image.digest, "path": str(path)})
    else:
        print(path)
    return 0


def run_record(args: argparse.Namespace, store: ImageStore) -> int:
    """Wait, then print how many accesses there were."""
    from dsec_imagefs.prefetch import Prefetcher

    image, prefetcher = store.resolve(args.ref), Prefetcher(store)
    prefetcher.record(image, seconds=args.seconds)
    say(f"recording for {args.seconds:.0f} s")
    time.sleep(args.seconds)
    trace = prefetcher.collect(image)
    if args.to:
        prefetcher.publish(trace, args.to, authfile=args.authfile)
    if args.json:
        print_json({"digest": image.digest, "accesses": len(trace.accesses)})
    else:
        print(len(trace.accesses))
    return 0


def run_prefetch(args: argparse.Namespace, store: ImageStore) -> int:
    """One image a line; exit code 1 when the deadline came first."""
    from dsec_imagefs.prefetch import Prefetcher, as_data
    from dsec_imagefs.remote import Remote

    deadline = time.monotonic() + args.deadline
    images = []
    for ref in _refs(args.refs):
        try:
            images.append(store.resolve(ref))
        except ImageError as error:
            if error.code != "not_found" or not args.origin:
                raise
            left_s = max(0.1, deadline - time.monotonic())
            images.append(Remote(store=store, url=args.origin, authfile=args.authfile, timeout_s=left_s).pull(ref))
    left_s = max(0.0, deadline - time.monotonic())
    done = Prefetcher(store).replay(images, timeout_s=left_s, whole=args.whole)
    if args.json:
        print_json([as_data(one) for one in done])
    else:
        rows = []
        for image, one in zip(images, done, strict=True):
            name = image.names[0] if image.names else image.digest[:19]
            rows.append([name, one.ranges, one.left, one.failed, "" if one.traced else "no trace"])
        print_table(("image", "ranges", "left", "failed", "note"), rows)
    return 1 if any(one.left or one.failed for one in done) else 0


def run_cache(args: argparse.Namespace, store: ImageStore) -> int:
    """The blob server's account."""
    from dsec_imagefs.blobd import BlobClient

    client = BlobClient(store.root)
    if not client.is_running():
        if args.json:
            print_json({"running": False, "blobs": []})
        else:
            say("no blob server runs: nothing of a pulled image was mounted since the start")
        return 0
    if args.stop:
        held = [row["digest"] for row in client.stats()["blobs"] if row.get("holds")]
        if held:
            raise UsageError("in_use", f"{len(held)} blobs are held by mounts", field="--stop", hint="unmount them")
        client.stop()
        return 0
    freed = client.evict(bytes_wanted=args.evict) if args.evict else 0
    stats = client.stats()
    if args.json:
        print_json({"running": True, "freed_bytes": freed, **stats})
        return 0
    rows = []
    for row in stats["blobs"]:
        here, complete = size(row.get("present_bytes", 0)), "yes" if row.get("complete") else "no"
        rows.append([row["digest"][:12], size(row["size"]), here, complete, len(row.get("holds", ()))])
    print_table(("data", "size", "here", "complete", "holds"), rows)
    if args.evict:
        say(f"freed {size(freed)}")
    return 0


def layer_rows(store: ImageStore, image: Image) -> list[dict[str, Any]]:
    """The layers of an image, lowest first: sizes, and how much of the data is on this disk."""
    rows = []
    for layer in store.layers(image):
        blob = layer.blob
        origin = store.objects.origin(blob.digest) if blob.size else None
        rows.append({
            "id": f"sha256:{layer.id}", "diff_id": layer.diff_id, "entries": layer.entries, "data": blob.digest,
            "size_bytes": blob.size, "here_bytes": store.objects.present_bytes(blob.digest, blob.size),
            "metadata_bytes": layer.meta.size, "origin": origin.store if origin is not None else "",
            "notes": list(layer.notes),
        })  # fmt: skip
    return rows


def _tell_image(args: argparse.Namespace, image: Image) -> int:
    for note in image.notes:
        say(note)
    if args.json:
        facts = {"digest": image.digest, "names": image.names, "layers": image.layers}
        print_json(facts | {"size_bytes": image.size_bytes})
    else:
        print(image.digest)
    return 0


def _refs(words: list[str]) -> list[str]:
    """Names, those in files (@FILE, one a line, # comments) among them."""
    found = []
    for word in words:
        if not word.startswith("@"):
            found.append(word)
            continue
        try:
            lines = Path(word[1:]).read_text("utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise UsageError("bad_list", f"{word[1:]} can't be read: {error}", field="IMAGE") from error
        found += [line for raw in lines if (line := raw.partition("#")[0].strip())]
    return found
