"""Layers: import of a large tar against mkfs.erofs on the same files, its memory, and the merge of 300 layers."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench.live import ROOT

if TYPE_CHECKING:
    from tests.bench.run import Bench

_MIB = 1 << 20

# Each runs in a process of its own, so that its CPU time is its own; and its memory by VmHWM, which an exec resets
# (ru_maxrss is inherited from whoever forked).
_PEAK = """
def peak_mib():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024
"""
_BUILD = (
    _PEAK
    + """
import json, os, resource, sys, time
from pathlib import Path
from dsec_imagefs.blob import Blob
from dsec_imagefs.layer import build_layer
before = resource.getrusage(resource.RUSAGE_SELF)
start = time.monotonic()
fd = os.open(sys.argv[1], os.O_RDONLY)
layer = build_layer(Blob(fd=fd, size=os.fstat(fd).st_size, name="layer"), Path(sys.argv[2]), encoding=sys.argv[3])
wall = time.monotonic() - start
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({
    "wall_s": wall, "cpu_s": used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime,
    "peak_rss_mib": peak_mib(), "entries": layer.entries, "meta_bytes": layer.meta.size,
    "blob_bytes": layer.blob.size, "wire_bytes": layer.wire.size,
}))
"""
)

_MERGE = (
    _PEAK
    + """
import json, resource, sys, time
from pathlib import Path
from dsec_imagefs.layer import Layer, merge_layers
out = Path(sys.argv[1])
layers = [Layer.parse((out / name).read_bytes()) for name in json.loads(Path(sys.argv[2]).read_text())]
before = resource.getrusage(resource.RUSAGE_SELF)
start = time.monotonic()
merged = merge_layers([(layer, out / layer.meta.digest) for layer in layers])
wall = time.monotonic() - start
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({
    "wall_s": wall, "cpu_s": used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime,
    "peak_rss_mib": peak_mib(), "layers": len(layers), "inodes": merged.inodes,
    "meta_bytes": len(merged.metadata), "devices": len(merged.devices),
}))
"""
)


def run(bench: Bench) -> dict[str, Any]:
    """Import times are medians of three runs in turn; mkfs.erofs is the distribution's, on the unpacked tree."""
    work = bench.data("layers")
    tar = work / "layer.tar"
    _write_tar(tar, files=bench.size(15_000, 1_500), total=bench.size(500 * _MIB, 50 * _MIB))
    found: dict[str, Any] = {"tar_bytes": tar.stat().st_size}
    for encoding in ("raw", "zstd"):
        found[f"import_{encoding}"] = _import(tar, work, encoding, runs=3 if encoding == "raw" else 1)
    found |= _against_mkfs(tar, work, found["import_raw"])
    found["compose"] = _compose(tar, work, bench.size(300, 60))
    return found


def _child(code: str, *args: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", code, *args], cwd=ROOT, check=True, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _import(tar: Path, work: Path, encoding: str, runs: int) -> dict[str, Any]:
    results = []
    for number in range(runs):
        out = work / f"import-{encoding}-{number}"
        out.mkdir()
        results.append(_child(_BUILD, str(tar), str(out), encoding))
        shutil.rmtree(out)
    return sorted(results, key=lambda row: row["wall_s"])[runs // 2]


def _against_mkfs(tar: Path, work: Path, ours: dict[str, Any]) -> dict[str, Any]:
    """mkfs.erofs of Debian 12 (1.5) reads no tar: what it is given is the tree, unpacked before or in the same time."""
    if shutil.which("mkfs.erofs") is None:
        return {"mkfs": None}
    tree = work / "tree"
    unpack, rows = [], []
    for _ in range(3):
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir()
        unpack.append(_timed(["tar", "-xf", str(tar), "-C", str(tree)]))
        image = work / "mkfs.erofs"
        image.unlink(missing_ok=True)
        rows.append(_timed(["mkfs.erofs", "--quiet", "-Enoinline_data", str(image), str(tree)], sync=image))
    shutil.rmtree(tree)
    mkfs, tarx = sorted(rows)[1], sorted(unpack)[1]
    return {
        "mkfs": {"wall_s": mkfs[0], "cpu_s": mkfs[1]},
        "unpack": {"wall_s": tarx[0], "cpu_s": tarx[1]},
        "ratio_to_unpack_and_mkfs": ours["wall_s"] / (mkfs[0] + tarx[0]),
        "ratio_to_mkfs_alone": ours["wall_s"] / mkfs[0],
        "ratio_cpu_to_unpack_and_mkfs": ours["cpu_s"] / (mkfs[1] + tarx[1]),
    }


def _timed(argv: list[str], sync: Path | None = None) -> tuple[float, float]:
    """Wall and CPU seconds of a program; with `sync`, until its output is on the disk, as ours is."""
    before, start = os.times(), time.monotonic()
    subprocess.run(argv, check=True, capture_output=True, timeout=300)
    if sync is not None:
        fd = os.open(sync, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return time.monotonic() - start, cpu


def _compose(tar: Path, work: Path, layers: int) -> dict[str, Any]:
    """The large layer, and small ones on it as commits make them: a few files changed, one removed."""
    from dsec_imagefs.blob import Blob
    from dsec_imagefs.layer import build_layer

    out = work / "stack"
    out.mkdir()
    names = []
    for number in range(layers):
        path = tar if number == 0 else work / "small.tar"
        if number:
            _write_small_tar(path, number)
        with ExitStack() as stack:
            fd = os.open(path, os.O_RDONLY)
            stack.callback(os.close, fd)
            layer = build_layer(Blob(fd=fd, size=os.fstat(fd).st_size, name=f"layer {number}"), out)
        names.append(layer.id)
    listing = work / "layers.json"
    listing.write_text(json.dumps(names))
    runs = [_child(_MERGE, str(out), str(listing)) for _ in range(3)]
    return sorted(runs, key=lambda row: row["wall_s"])[1]


def _name(number: int) -> str:
    return f"usr/lib/p{number % 97:02d}/m{number % 1009 // 97}/file-{number:05d}.py"


def _write_tar(path: Path, files: int, total: int) -> None:
    """Files of mixed sizes that sum up to about `total`, in directories as a distribution has them."""
    rng = random.Random(7)
    weights = [rng.paretovariate(1.1) for _ in range(files)]
    scale = total / sum(weights)
    text = b"".join(b"%d some line of some program\n" % rng.randrange(10**9) for _ in range(40_000))
    seen: set[str] = set()
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for number, weight in enumerate(weights):
            name = _name(number)
            for parent in reversed(Path(name).parents):
                if str(parent) != "." and str(parent) not in seen:
                    seen.add(str(parent))
                    info = tarfile.TarInfo(str(parent))
                    info.type, info.mode, info.mtime = tarfile.DIRTYPE, 0o755, 1_700_000_000
                    tar.addfile(info)
            _add(tar, name, _body(rng, text, int(weight * scale)))


def _body(rng: random.Random, text: bytes, size: int) -> bytes:
    """Half of it compresses well, half not at all."""
    at = rng.randrange(len(text) // 2)
    half = (text[at:] * (size // len(text) + 2))[: size // 2]
    return half + rng.randbytes(size - len(half))


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = len(data), 0o644, 1_700_000_000
    tar.addfile(info, io.BytesIO(data))


def _write_small_tar(path: Path, number: int) -> None:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for step in range(6):
            _add(tar, _name(number * 41 + step * 7), b"layer %d\n" % number * 50)
        gone = Path(_name(number * 13))
        _add(tar, f"{gone.parent}/.wh.{gone.name}", b"")
