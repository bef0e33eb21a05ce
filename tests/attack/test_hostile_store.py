"""A store that attacks its reader: huge lengths, bombs, redirects into this machine and its cloud, path tricks.

Each attack is refused by a named layer, in bounded memory; each has a twin that shows the way open without the trick.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import socket
import threading
import time
import tracemalloc
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import zstandard
from dsec_imagefs.errors import ImageError
from dsec_imagefs.fetch import BlockFetcher
from dsec_imagefs.image import ImageConfig
from dsec_imagefs.layer.index import Index, max_wire_length
from dsec_imagefs.layer.manifest import ImageManifest, Part
from dsec_imagefs.stores import artifact, http, registry
from dsec_imagefs.stores.base import MAX_DOCUMENT_BYTES, StoreError
from dsec_imagefs.stores.credentials import Login, no_login
from dsec_imagefs.stores.http import HttpDoor
from dsec_imagefs.stores.parse import parse_store
from dsec_imagefs.stores.retry import Backoff, retry
from dsec_imagefs.stores.transfer import pull_image

from tests.kit import lying_store as lie
from tests.kit.lying_store import LyingStore, lying_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dsec_imagefs.stores.base import Store

pytestmark = pytest.mark.leaks_ok  # the server's threads close their connections in their own time
BLOCK = 64 << 10
DATA = (b"text that compresses well, %d. " * 4000)[:BLOCK]
DIGEST = hashlib.sha256(DATA).hexdigest()
ONCE = Backoff(attempts=2, base_s=0.001)


@pytest.fixture
def server() -> Iterator[LyingStore]:
    with lying_store() as found:
        found.add(DATA)
        yield found


@pytest.fixture
def store(server: LyingStore) -> Iterator[Store]:
    found = parse_store(server.url, logins=no_login)
    yield found
    found.close()


def soon(seconds: float = 20.0) -> float:
    return lie.monotonic_in(seconds)


@contextmanager
def bounded(limit_bytes: int) -> Iterator[None]:
    """What Python holds at its peak stays below a limit."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit_bytes, f"{peak} bytes were held"


# --- lengths


def claims(length: int) -> lie.Fault:
    """A 206 that claims to be longer than what was asked, and goes on for ever."""

    def fault(handler: lie.Handler, data: bytes, start: int, end: int) -> None:
        handler.close_connection = True
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {start}-{end}/{len(data)}")
        handler.send_header("Content-Length", str(length))
        handler.end_headers()
        while not handler.lying.over.is_set():
            handler.wfile.write(bytes(1 << 16))

    return fault


def test_a_body_of_a_terabyte_is_not_read(server: LyingStore, store: Store) -> None:
    server.every = claims(1 << 40)
    with bounded(4 << 20), pytest.raises(StoreError) as caught:
        store.read(DIGEST, 0, 1000, deadline=soon())
    assert caught.value.code == "bad_reply"
    assert "Content-Length" in str(caught.value)
    server.every = claims(1000)
    assert store.read(DIGEST, 0, 1000, deadline=soon()) == bytes(1000), "the twin: of the right length it is read"


def test_a_body_without_end_is_cut(server: LyingStore, store: Store) -> None:
    server.every = lie.endless
    with bounded(3 * artifact.MAX_ARTIFACT_BYTES):
        assert store.read(DIGEST, 1000, 1000, deadline=soon()) == bytes(1000), "200: read up to what was asked"
        with pytest.raises(StoreError) as caught:
            store.get_ref("a:1", deadline=soon())
    assert caught.value.code == "too_large"


def test_headers_without_end_are_cut(server: LyingStore, store: Store) -> None:
    def fault(handler: lie.Handler, data: bytes, start: int, end: int) -> None:
        handler.close_connection = True
        handler.wfile.write(b"HTTP/1.1 206 OK\r\n")
        while not handler.lying.over.is_set():
            handler.wfile.write(b"X-Pad: " + b"x" * 4096 + b"\r\n")

    server.every = fault
    with bounded(8 << 20), pytest.raises(StoreError) as caught:
        store.read(DIGEST, 0, 10, deadline=soon())
    assert caught.value.code == "short"


@pytest.mark.parametrize("told", ["9" * 5000, "-5", "0x10", "1 000", "١٢"])
def test_a_length_that_is_none(server: LyingStore, store: Store, told: str) -> None:
    def fault(handler: lie.Handler, data: bytes, start: int, end: int) -> None:
        handler.close_connection = True
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: " + told.encode() + b"\r\n\r\n")

    server.every = fault
    with pytest.raises(StoreError):
        store.size(DIGEST, deadline=soon())
    server.every = None
    # The liar closed a connection that it had not announced to close: whoever meets that asks again, as all readers do.
    assert retry(lambda until: store.size(DIGEST, deadline=until), deadline=soon()) == len(DATA)


# --- bombs


def one_block(wire: bytes) -> Index:
    row = (hashlib.sha256(DATA).digest(), 0, len(wire))
    return Index.of([row], block_bytes=BLOCK, blob_size=len(DATA), encoding="zstd")


@functools.cache
def bombs() -> dict[str, bytes]:
    plain = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    unsized = plain.compress(bytes(1 << 28)) + plain.flush()
    return {
        "says its size": zstandard.compress(bytes(1 << 28)),
        "hides its size": unsized,
        "many frames": zstandard.compress(DATA[:100]) * 200,
        "lies about its size": (
            zstandard.ZstdCompressor(write_checksum=False).compress(DATA)[:2] + bytes(2) + unsized[4:]
        ),
        "wide window": zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters(window_log=27, enable_ldm=True)
        ).compress(bytes(1 << 28)),
    }


@pytest.mark.parametrize(
    "name", ["says its size", "hides its size", "many frames", "lies about its size", "wide window"]
)
def test_a_bomb_is_not_unpacked(server: LyingStore, store: Store, name: str) -> None:
    wire = bombs()[name][: max_wire_length(BLOCK)]
    fetcher = BlockFetcher(store=store, index=one_block(wire), wire_digest=server.add(wire), backoff=ONCE)
    with bounded(4 << 20), pytest.raises(StoreError) as caught:
        fetcher.fetch(0, deadline=soon())
    assert caught.value.code == "corrupt"
    assert "block 0" in str(caught.value)
    good = zstandard.compress(DATA)
    twin = BlockFetcher(store=store, index=one_block(good), wire_digest=server.add(good))
    assert twin.fetch(0, deadline=soon()) == DATA


def test_an_index_can_not_ask_for_more_than_a_block() -> None:
    good = zstandard.compress(DATA)
    assert Index.of(
        [(hashlib.sha256(DATA).digest(), 0, len(good))], block_bytes=BLOCK, blob_size=BLOCK, encoding="zstd"
    )
    for offset, length in ((0, 1 << 31), (1 << 60, len(good)), (0, max_wire_length(BLOCK) + 1)):
        with pytest.raises(ImageError) as caught:
            Index.of([(hashlib.sha256(DATA).digest(), offset, length)], block_bytes=BLOCK, blob_size=BLOCK,
                     encoding="zstd")  # fmt: skip
        assert caught.value.code == "corrupt"


# --- where a store may send us


@pytest.mark.parametrize(
    "location",
    ["file:///etc/passwd", "ftp://127.0.0.1/x", "http://user:pass@127.0.0.1/x", "//", "http://[::1", "data:,x"],
)
def test_a_redirect_to_no_web_address(server: LyingStore, store: Store, location: str) -> None:
    server.every = lie.redirect(location)
    with pytest.raises(StoreError) as caught:
        store.read(DIGEST, 0, 5, deadline=soon())
    assert caught.value.code in ("denied", "bad_reply")
    assert not caught.value.retryable or caught.value.code == "bad_reply"
    server.every = lie.redirect(f"http://{server.address}/elsewhere/{DIGEST}")
    with pytest.raises(StoreError, match="redirects"):
        store.read(DIGEST, 0, 5, deadline=soon())
    server.every = None
    server.faults.append(lie.redirect(f"http://{server.address}/elsewhere/{DIGEST}"))
    assert store.read(DIGEST, 0, 5, deadline=soon()) == DATA[:5], "the twin: to a place that is one"


@contextmanager
def _listener() -> Iterator[tuple[str, list[bytes]]]:
    """Something on loopback that must not be spoken to; what it heard."""
    heard: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.1)
    over = threading.Event()

    def listen() -> None:
        while not over.is_set():
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                continue
            with peer:
                peer.settimeout(2)
                try:
                    heard.append(peer.recv(1000))
                    peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecret")
                except OSError:
                    heard.append(b"")

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}", heard
    finally:
        over.set()
        thread.join(5)
        listener.close()


def test_a_name_that_resolves_to_this_machine_hears_nothing(monkeypatch) -> None:
    """The name is harmless, its address is not: checked after connect, before the first byte."""
    with _listener() as (address, heard):
        port = address.partition(":")[2]
        door = HttpDoor(origin="https://reg.example")
        url = f"http://rebound.example:{port}/latest/meta-data"
        real = socket.getaddrinfo
        monkeypatch.setattr(
            socket, "getaddrinfo",
            lambda host, *rest, **more: real("127.0.0.1" if host == "rebound.example" else host, *rest, **more),
        )  # fmt: skip
        with pytest.raises(StoreError) as caught, door.exchange("GET", url, deadline=soon(), what="x"):
            pass
        assert caught.value.code == "denied"
        assert "127.0.0.1" in str(caught.value)
        time.sleep(0.3)
        assert [data for data in heard if data] == []
        monkeypatch.setattr(http, "is_private_to_host", lambda _address: False)
        with door.exchange("GET", url, deadline=soon(), what="x") as reply:
            assert reply.whole(100) == b"secret", "the twin: without the check it is reached"
        door.close()


@pytest.mark.parametrize(
    "realm", ["http://169.254.169.254/latest/token", "http://tokens.example/", "file:///etc/shadow"]
)
def test_a_password_is_not_sent_where_a_challenge_wants_it(server: LyingStore, realm: str, monkeypatch) -> None:
    sent: list[str] = []
    original = HttpDoor.exchange
    monkeypatch.setattr(
        HttpDoor, "exchange", lambda self, method, url, **rest: sent.append(url) or original(self, method, url, **rest)
    )
    server.token = "x"
    server.challenge = f'Bearer realm="{realm}",service="x"'
    # As a store in the network sees it: its own address is not loopback.
    monkeypatch.setattr("dsec_imagefs.stores.http.is_loopback_url", lambda url: False)
    found = parse_store(server.url, logins=lambda _: Login(user="me", password="hunter2"))
    with pytest.raises(StoreError) as caught:
        found.read(DIGEST, 0, 5, deadline=soon())
    assert caught.value.code == "denied"
    assert len(sent) == 1, "only the store was spoken to"
    assert "hunter2" not in str(caught.value)
    found.close()


def test_a_challenge_can_not_widen_the_scope(server: LyingStore) -> None:
    server.token = "good"
    server.challenge = f'Bearer realm="http://{server.address}/token",scope="registry:catalog:* repository:all:delete"'
    found = parse_store(server.url, logins=lambda _: Login(user="me", password="hunter2"))
    assert found.read(DIGEST, 0, 5, deadline=soon()) == DATA[:5]
    (asked,) = server.seen("/token")
    assert "catalog" not in asked[1]
    assert "delete" not in asked[1]
    found.close()


def test_a_header_can_not_be_smuggled_by_a_token(server: LyingStore) -> None:
    server.token = "good"
    server.tokens.extend(["good\r\nX-Evil: 1"])
    found = parse_store(server.url, logins=no_login)
    with pytest.raises(StoreError) as caught:
        found.read(DIGEST, 0, 5, deadline=soon())
    assert "no token" in str(caught.value)
    assert found.read(DIGEST, 0, 5, deadline=soon()) == DATA[:5], "the twin: an honest token"
    assert not [row for row in server.requests if "X-Evil" in row[2]]
    found.close()


# --- documents


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "outside").write_text("untouched")
    (tmp_path / "objects").mkdir()
    return tmp_path / "objects"


def serve_image(server: LyingStore, manifest: bytes, image: str) -> None:
    raw = artifact.render_image(image, manifest, [])
    server.add(manifest)

    def serve(handler: lie.Handler, data: bytes, start: int, end: int) -> None:
        if "/manifests/" in handler.path:
            return handler.reply(200, raw)
        return handler.serve(data, start, end)

    server.every = serve


@pytest.mark.parametrize("evil", ["../outside", "/etc/passwd", "..", "a/b", "", "AB" * 32, "ab" * 32 + "\0"])
def test_a_digest_can_not_be_a_path(server: LyingStore, store: Store, here: Path, evil: str) -> None:
    manifest = ImageManifest(layers=(), merged=Part(digest=DIGEST, size=len(DATA)))
    for document in (
        {"layers": [evil]}, {"merged": {"digest": evil, "size": 9}}, {"merged": {"digest": DIGEST, "size": -1}},
        {"merged": {"digest": DIGEST, "size": 1 << 70}},
    ):  # fmt: skip
        raw = json.dumps(json.loads(manifest.render()) | document).encode()
        serve_image(server, raw, manifest.digest)
        with pytest.raises(ImageError) as caught:
            pull_image(store, manifest.digest, here, deadline=soon(), backoff=ONCE)
        assert caught.value.code in ("corrupt", "too_large")
    assert list(here.iterdir()) == []
    assert (here.parent / "outside").read_text() == "untouched"
    serve_image(server, manifest.render(), manifest.digest)
    pull_image(store, manifest.digest, here, deadline=soon(), backoff=ONCE)
    assert [path.name for path in here.iterdir()] == [DIGEST], "the twin: an honest image"


def test_another_image_under_the_digest(server: LyingStore, store: Store, here: Path) -> None:
    manifest = ImageManifest(layers=(), merged=Part(digest=DIGEST, size=len(DATA)))
    other = replace(manifest, config=ImageConfig(entrypoint=("/evil",)))
    serve_image(server, other.render(), manifest.digest)
    with pytest.raises(StoreError) as caught:
        pull_image(store, manifest.digest, here, deadline=soon(), backoff=ONCE)
    assert caught.value.code == "corrupt"
    assert list(here.iterdir()) == []


def test_a_manifest_deeper_than_the_stack(server: LyingStore, store: Store, here: Path) -> None:
    for raw in (b"[" * 500_000, b'{"a":' * 200_000):
        serve_image(server, raw, "ab" * 32)
        with pytest.raises(ImageError) as caught:
            pull_image(store, "ab" * 32, here, deadline=soon(), backoff=ONCE)
        assert caught.value.code == "corrupt"


def test_a_document_that_claims_gigabytes_is_not_asked_for(server: LyingStore, store: Store) -> None:
    found = json.loads(artifact.render_image("ab" * 32, b"{}", []))
    found["config"]["size"] = MAX_DOCUMENT_BYTES + 1
    raw = json.dumps(found).encode()
    server.every = lambda handler, data, start, end: handler.reply(200, raw)
    with bounded(4 << 20), pytest.raises(StoreError) as caught:
        store.get_image("ab" * 32, deadline=soon())
    assert caught.value.code == "too_large"
    assert server.seen("/blobs/") == []


@pytest.mark.parametrize(
    "tags",
    [["../../etc/passwd", "a/b", "", "x" * 5000, 7, None, ["x"], "a\nb"], "text", {"a": 1}, 5],
)
def test_tags_that_are_no_names_are_left_out(server: LyingStore, store: Store, tags: object) -> None:
    body = json.dumps({"name": "x", "tags": tags}).encode()
    server.every = lambda handler, data, start, end: handler.reply(200, body)
    try:
        names = store.refs(deadline=soon())
    except StoreError as error:
        assert error.code == "bad_reply"
    else:
        assert all("/" not in name.strip("/") and ".." not in name for name in names)


def test_pages_of_tags_without_end(server: LyingStore, store: Store, monkeypatch) -> None:
    monkeypatch.setattr(registry, "MAX_PAGES", 50)
    counter = iter(range(10**9))

    def fault(handler: lie.Handler, data: bytes, start: int, end: int) -> None:
        tag = f"t_c{next(counter)}"
        handler.reply(200, json.dumps({"tags": [tag]}).encode(), Link='</v2/x?n=1>; rel="next"')

    server.every = fault
    store.refs(deadline=soon(30))
    assert len(server.requests) == 50


# --- a directory others may write to


def test_links_and_special_files_in_a_directory_store(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(DATA)
    found = parse_store(f"dir:{tmp_path}/store")
    found.put_trace("ab" * 32, b"x", deadline=soon())
    place = tmp_path / "store/objects" / DIGEST[:2] / DIGEST
    place.parent.mkdir(parents=True)
    place.symlink_to(secret)
    with pytest.raises(StoreError) as caught:
        found.read(DIGEST, 0, 5, deadline=soon())
    assert caught.value.code == "denied"
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(StoreError) as caught:
        found.read(DIGEST, 0, 5, deadline=soon(1.0))
    assert caught.value.code == "denied"
    place.unlink()
    found.put(DIGEST, secret, deadline=soon())
    assert found.read(DIGEST, 0, 5, deadline=soon()) == DATA[:5], "the twin: a file that is one"


def test_random_replies_are_errors_not_crashes(server: LyingStore, store: Store) -> None:
    rng = random.Random(3)

    def fault(handler: lie.Handler, data: bytes, start: int, end: int) -> None:
        handler.close_connection = True
        head = rng.choice(
            [b"HTTP/1.1 206 OK\r\n", b"HTTP/1.1 200 OK\r\n", b"", b"HTTP/9.9 999 X\r\n", b"HTTP/1.1 100 X\r\n"]
        )
        handler.wfile.write(
            head + rng.randbytes(rng.randrange(300)) + rng.choice([b"\r\n\r\n", b""]) + rng.randbytes(40)
        )

    server.every = fault
    for _ in range(60):
        try:
            store.read(DIGEST, 0, 5, deadline=soon())
        except StoreError as error:
            assert len(str(error)) < 600
