"""What every store promises, asked of each: a directory (plain, and slow and hedged), docker-registry, an S3 server."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from typing import TYPE_CHECKING

import pytest
from dsec_imagefs.stores.base import StoredObject, StoreError
from dsec_imagefs.stores.credentials import Login
from dsec_imagefs.stores.parse import parse_store
from dsec_imagefs.stores.retry import retry

from tests.kit.abilities import needs
from tests.kit.store_servers import docker_registry, make_bucket, s3_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dsec_imagefs.stores.base import Store

# The servers live for the whole module, so that their start is paid once: the leak check sees them come and go.
pytestmark = pytest.mark.leaks_ok

IMAGE = "ab" * 32
KINDS = [
    "directory",
    "hedged",
    pytest.param("registry", marks=needs("docker-registry")),
    pytest.param("s3", marks=needs("moto")),
]


@pytest.fixture(scope="module", params=KINDS)
def url(request, tmp_path_factory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("store")
    if request.param in ("directory", "hedged"):
        yield f"dir:{home}/store" + ("?hedge_ms=0.1&latency_ms=0.1" if request.param == "hedged" else "")
    elif request.param == "registry":
        with docker_registry(home) as address:
            yield f"oci://{address}/team/images"
    else:
        with s3_server() as endpoint:
            make_bucket(endpoint, "images")
            yield f"s3://images/some/prefix?endpoint={endpoint}&path_style=true"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    found = open_store(url)
    yield found
    found.close()


def open_store(url: str) -> Store:
    return parse_store(url, logins=lambda _: Login(user="key", password="secret"))


def soon() -> float:
    return time.monotonic() + 40


def make(path: Path, size: int, seed: int) -> tuple[str, bytes]:
    data = random.Random(f"{seed} {size}").randbytes(size)
    path.write_bytes(data)
    return hashlib.sha256(data).hexdigest(), data


def code(call) -> str:
    with pytest.raises(StoreError) as caught:
        call()
    return caught.value.code


@pytest.mark.parametrize("size", [1, 4096, 3 << 20])
def test_what_is_put_can_be_read_anywhere(store: Store, tmp_path: Path, size: int) -> None:
    digest, data = make(tmp_path / "f", size, 1)
    assert not store.has(digest, deadline=soon())
    steps: list[tuple[int, int]] = []
    assert store.put(digest, tmp_path / "f", deadline=soon(), progress=lambda *step: steps.append(step))
    assert steps[-1] == (size, size)
    assert store.size(digest, deadline=soon()) == size
    assert store.has("sha256:" + digest, deadline=soon(), size=size)
    for offset, length in {(0, size), (0, 0), (0, 1), (size - 1, 1), (size // 3, size // 2 or 1)}:
        assert store.read(digest, offset, length, deadline=soon()) == data[offset : offset + length]
    assert store.put(digest, tmp_path / "f", deadline=soon()) is False


def test_a_read_beyond_the_end_is_an_error(store: Store, tmp_path: Path) -> None:
    digest, _ = make(tmp_path / "f", 5000, 2)
    store.put(digest, tmp_path / "f", deadline=soon())
    assert code(lambda: store.read(digest, 4990, 11, deadline=soon())) == "short"
    assert code(lambda: store.read(digest, 5000, 1, deadline=soon())) == "short"
    assert code(lambda: store.read(digest, 1 << 40, 1, deadline=soon())) == "short"
    assert store.read(digest, 4990, 10, deadline=soon()), "and the connection is well"


def test_what_is_not_there(store: Store) -> None:
    absent = "0" * 64
    store.put_trace("ef" * 32, b"so that there is a store", deadline=soon())
    assert code(lambda: store.read(absent, 0, 1, deadline=soon())) == "not_found"
    assert code(lambda: store.size(absent, deadline=soon())) == "not_found"
    assert code(lambda: store.get_image(absent, deadline=soon())) == "not_found"
    assert code(lambda: store.get_ref("no/such:name", deadline=soon())) == "not_found"
    assert code(lambda: store.get_trace(absent, deadline=soon())) == "not_found"
    assert code(lambda: store.put_ref("no/such:name", absent, deadline=soon())) == "not_found"
    store.delete(absent, deadline=soon())
    store.delete_image(absent, deadline=soon())


def test_a_file_of_another_digest_is_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"not what it says")
    assert code(lambda: store.put("cd" * 32, tmp_path / "f", deadline=soon())) == "corrupt"
    assert not store.has("cd" * 32, deadline=soon())


def test_images_names_and_traces(store: Store, tmp_path: Path) -> None:
    digest, _ = make(tmp_path / "f", 4096, 3)
    objects = [StoredObject(digest=digest, size=4096, kind="wire"), StoredObject(digest="0" * 64, size=1, kind="meta")]
    store.put(digest, tmp_path / "f", deadline=soon())
    assert code(lambda: store.put_image(IMAGE, b"{}", objects, deadline=soon())) in ("not_found", "bad_reply")
    assert code(lambda: store.get_image(IMAGE, deadline=soon())) == "not_found", "an image needs all its objects"
    for _ in range(2):
        store.put_image(IMAGE, b'{"a": 1}', objects[:1], deadline=soon())
    assert store.get_image("sha256:" + IMAGE, deadline=soon()) == b'{"a": 1}'
    other = "cd" * 32
    store.put_image(other, b'{"b": 2}', objects[:1], deadline=soon())
    before = set(store.refs(deadline=soon()))
    for name in ("team/app_x:1.0", "debian:12", "image-" + "1" * 64 + ":latest"):
        store.put_ref(name, IMAGE, deadline=soon())
        assert store.get_ref(name, deadline=soon()) == IMAGE
    store.put_ref("debian:12", other, deadline=soon())
    assert store.get_ref("debian:12", deadline=soon()) == other
    assert set(store.refs(deadline=soon())) - before == {"team/app_x:1.0", "debian:12", "image-" + "1" * 64 + ":latest"}
    for trace in (b"first", b"second"):
        store.put_trace(IMAGE, trace, deadline=soon())
        assert store.get_trace(IMAGE, deadline=soon()) == trace
    assert code(lambda: store.put_ref("../../x", IMAGE, deadline=soon())) == "bad_name"


def test_what_is_removed_is_gone(store: Store, tmp_path: Path) -> None:
    digest, _ = make(tmp_path / "f", 4096, 4)
    store.put(digest, tmp_path / "f", deadline=soon())
    image = "12" * 32
    store.put_image(image, b'{"gone": 1}', [StoredObject(digest=digest, size=4096, kind="wire")], deadline=soon())
    store.put_ref("gone:1", image, deadline=soon())
    try:
        store.delete_ref("gone:1", deadline=soon())
    except StoreError as error:
        assert error.code == "unsupported", "a registry before OCI distribution 1.1"
    store.delete_image(image, deadline=soon())
    store.delete(digest, deadline=soon())
    assert code(lambda: store.get_image(image, deadline=soon())) == "not_found"
    assert code(lambda: store.get_ref("gone:1", deadline=soon())) == "not_found"
    assert not store.has(digest, deadline=soon())


def test_two_writers_and_many_readers_at_once(url: str, store: Store, tmp_path: Path) -> None:
    digest, data = make(tmp_path / "f", 2 << 20, 5)
    wrong: list[object] = []

    def write() -> None:
        own = open_store(url)
        try:
            # Repeated as a pusher does: moto answers 500 to two that replace one object at once.
            retry(lambda until: own.put(digest, tmp_path / "f", deadline=until), deadline=soon())
        except Exception as error:
            wrong.append(error)
        finally:
            own.close()

    def read(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(10):
            offset = rng.randrange(len(data) - 70_000)
            try:
                if store.read(digest, offset, 65536, deadline=soon()) != data[offset : offset + 65536]:
                    wrong.append(offset)
            except StoreError as error:
                if error.code != "not_found" and not error.retryable:
                    wrong.append(error)

    threads = [threading.Thread(target=write) for _ in range(2)]
    threads += [threading.Thread(target=read, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert wrong == []
    assert store.read(digest, 0, len(data), deadline=soon()) == data


def test_no_call_goes_beyond_its_deadline(store: Store, tmp_path: Path) -> None:
    make(tmp_path / "f", 10, 6)
    over = time.monotonic() - 0.1
    assert code(lambda: store.read(IMAGE, 0, 1, deadline=over)) == "deadline"
    assert code(lambda: store.put(IMAGE, tmp_path / "f", deadline=over)) == "deadline"
    assert code(lambda: store.put_trace(IMAGE, b"x", deadline=over)) == "deadline"
    assert code(lambda: store.refs(deadline=over)) == "deadline"
