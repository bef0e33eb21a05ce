"""Runs benches and writes bench-results/<name>.json; prints the same. `--quick` is for a look, not for a claim."""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench.live import DSEC, ROOT, machine

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = "debootstrap:bookworm?include=python3,python3-pytest,gcc,g++,git,ca-certificates,procps"
NAMES = ("create", "exec", "idle", "cycles", "fncall", "consul", "layers", "plugin", "blobd", "images")
WITHOUT_IMAGE = {"consul", "layers", "blobd"}


@dataclass(frozen=True)
class Bench:
    """What a bench is given."""

    work: Path
    images: Path
    image: str
    quick: bool

    def size(self, full: int, quick: int) -> int:
        """The count to use."""
        return quick if self.quick else full

    def data(self, name: str) -> Path:
        """An empty data directory."""
        path = self.work / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    @contextmanager
    def mounted_root(self) -> Iterator[Path]:
        """The image's root, mounted for a peer by the same store."""
        from dsec_imagefs import ImageStore, MountTable

        store = ImageStore(self.images)
        table = MountTable(store, self.work / "peer-mounts")
        digest = store.resolve(self.image).digest
        try:
            yield Path(table.acquire(digest, user="bench"))
        finally:
            table.release(digest, user="bench")
            table.close()


def main() -> int:
    """Exit 0 when every bench ran."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.run")
    parser.add_argument("names", nargs="*", help=", ".join(NAMES))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--images", type=Path, help="an image store that holds the image")
    parser.add_argument("--image", default="debian-dev")
    parser.add_argument("--out", type=Path, default=ROOT / "bench-results")
    args = parser.parse_args()
    names = args.names or [*NAMES]
    args.out.mkdir(parents=True, exist_ok=True)
    images = args.images or ROOT / "dsec-data" / "images"
    work = Path(tempfile.mkdtemp(prefix="dsec-bench-"))
    try:
        if args.images is None and not WITHOUT_IMAGE.issuperset(names):
            _import_image(images, args.image)
        for name in names:
            module = importlib.import_module(f"tests.bench.bench_{name}")
            facts = machine()
            bench = Bench(work=work / name, images=images, image=args.image, quick=args.quick)
            report: dict[str, Any] = {"bench": name, "quick": args.quick, "machine": facts, "result": module.run(bench)}
            text = json.dumps(report, indent=2)
            (args.out / f"{name}.json").write_text(text + "\n")
            print(text)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return 0


def _import_image(images: Path, name: str) -> None:
    known = subprocess.run(
        [str(DSEC), "image", "inspect", name, "--store", str(images)], capture_output=True, check=False
    )
    if known.returncode != 0:
        argv = [str(DSEC), "image", "import", SOURCE, "--name", name, "--store", str(images)]
        subprocess.run(argv, check=True, timeout=900)


if __name__ == "__main__":
    sys.exit(main())
