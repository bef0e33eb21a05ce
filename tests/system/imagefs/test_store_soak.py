"""An image mounted from a registry that lies one time in three: what is read through the kernel is the image's."""

from __future__ import annotations

import hashlib
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from dsec_imagefs import ImageStore, MountTable
from dsec_imagefs.blobd import BlobClient
from dsec_imagefs.mountinfo import read_mounts
from dsec_imagefs.remote import Remote
from dsec_imagefs.syscalls import MNT_DETACH, umount

from tests.kit import lying_store as lie
from tests.kit.abilities import needs
from tests.kit.lying_store import lying_store

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [needs("root", "erofs", "fuse"), pytest.mark.leaks_ok]  # sockets of the liar's threads close in their time
FAULTS = [
    lie.short_body, lie.short_range, lie.long_body, lie.wrong_bytes, lie.shifted_range, lie.no_content_range,
    lie.whole_object, lie.reset, lie.encoded, lie.status(500), lie.status(503), lie.status(403), lie.status(401),
    lie.status(429, Retry_After="0"), lie.status(416),
]  # fmt: skip
FILES = 6
FILE_BYTES = 5 << 20


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    BlobClient(tmp_path / "node").stop()
    for one in reversed(read_mounts()):
        if one.target.startswith(f"{tmp_path}/"):
            umount(Path(one.target), MNT_DETACH)


def test_no_wrong_byte_is_read(place: Path) -> None:
    seed = time.time_ns()
    rng = random.Random(seed)
    tree = place / "tree"
    tree.mkdir()
    data = {f"f{number}": rng.randbytes(FILE_BYTES) for number in range(FILES)}
    for name, content in data.items():
        (tree / name).write_bytes(content)
    with lying_store() as server:
        server.token = "good"  # handed out to everyone, so that a refusal can heal
        builder = ImageStore(place / "builder")
        builder.import_image(f"dir:{tree}", "demo")
        Remote(store=builder, url=server.url).push("demo")
        node = ImageStore(place / "node")
        image = Remote(store=node, url=server.url).pull("demo")
        wrong: list[int] = []

        def sometimes(handler: lie.Handler, content: bytes, start: int, end: int) -> None:
            if "Range" in handler.headers and rng.random() < 0.35:
                wrong.append(start)
                return rng.choice(FAULTS)(handler, content, start, end)
            return handler.serve(content, start, end)

        server.every = sometimes
        table = MountTable(node, place / "mounts")
        root = table.acquire(image.digest, "test")

        def read(number: int) -> int:
            """Random ranges, then all of a file; an error of a store that lied too often is no wrong byte."""
            own, errors = random.Random(seed + number), 0
            name = f"f{number % FILES}"
            for _ in range(12):
                offset = own.randrange(FILE_BYTES - 70_000)
                length = own.randrange(1, 70_000)
                try:
                    with (root / name).open("rb", buffering=0) as file:
                        file.seek(offset)
                        assert file.read(length) == data[name][offset : offset + length], (seed, name, offset)
                except OSError:
                    errors += 1
            return errors

        with ThreadPoolExecutor(FILES) as pool:
            errors = sum(pool.map(read, range(FILES)))
        assert wrong, "the registry did lie"
        assert errors < FILES, f"seed {seed}: {errors} reads of {12 * FILES} failed, {len(wrong)} faults"
        server.every = None
        for name, content in data.items():
            assert hashlib.sha256((root / name).read_bytes()).digest() == hashlib.sha256(content).digest(), seed
        table.release(image.digest, "test")
        table.close()
