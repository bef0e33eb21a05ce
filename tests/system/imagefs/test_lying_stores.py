"""A store over HTTP that is short, long, wrong, slow, busy or forgetful: the right bytes come, or a clear error."""

from __future__ import annotations

import hashlib
import logging
import random
import time
from typing import TYPE_CHECKING

import pytest
from dsec_imagefs.fetch import BlockFetcher
from dsec_imagefs.layer.index import Index
from dsec_imagefs.stores import http, upload
from dsec_imagefs.stores.base import StoreError
from dsec_imagefs.stores.credentials import Login, no_login
from dsec_imagefs.stores.parse import parse_store
from dsec_imagefs.stores.retry import Backoff

from tests.kit import lying_store as lie
from tests.kit.lying_store import LyingStore, lying_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsec_imagefs.stores.registry import RegistryStore

BLOCK = 64 << 10
DATA = random.Random(7).randbytes(3 * BLOCK)
QUICK = Backoff(attempts=4, base_s=0.001, attempt_s=10.0)
pytestmark = pytest.mark.leaks_ok  # the server's threads close their connections in their own time


@pytest.fixture
def server() -> Iterator[LyingStore]:
    with lying_store() as found:
        found.add(DATA)
        yield found


@pytest.fixture
def store(server: LyingStore) -> Iterator[RegistryStore]:
    found = parse_store(server.url, logins=no_login)
    yield found  # type: ignore[misc]
    found.close()


def digest() -> str:
    return hashlib.sha256(DATA).hexdigest()


def fetcher(store: RegistryStore, **options) -> BlockFetcher:
    rows = [(hashlib.sha256(DATA[at : at + BLOCK]).digest(), at, BLOCK) for at in range(0, len(DATA), BLOCK)]
    index = Index.of(rows, block_bytes=BLOCK, blob_size=len(DATA), encoding="raw")
    return BlockFetcher(store=store, index=index, wire_digest=digest(), backoff=QUICK, **options)


def soon(seconds: float = 30.0) -> float:
    return lie.monotonic_in(seconds)


ONCE = {
    "short body": (lie.short_body, "short"),
    "short range": (lie.short_range, "short"),
    "long body": (lie.long_body, "bad_reply"),
    "another range": (lie.shifted_range, "bad_reply"),
    "no Content-Range": (lie.no_content_range, "bad_reply"),
    "reset": (lie.reset, "short"),
    "encoded": (lie.encoded, "bad_reply"),
    "416": (lie.status(416, Content_Range="bytes */99"), "short"),
    "500": (lie.status(500), "unavailable"),
    "502": (lie.status(502), "unavailable"),
    "503": (lie.status(503), "unavailable"),
    "429": (lie.status(429, Retry_After="0"), "throttled"),
}


@pytest.mark.parametrize("name", ONCE)
def test_a_fault_is_an_error_and_heals(server: LyingStore, store: RegistryStore, name: str) -> None:
    fault, code = ONCE[name]
    server.faults.append(fault)
    with pytest.raises(StoreError) as caught:
        store.read(digest(), BLOCK, BLOCK, deadline=soon())
    assert (caught.value.code, caught.value.retryable) == (code, True)
    server.faults.append(fault)
    assert fetcher(store).fetch(1, deadline=soon()) == DATA[BLOCK : 2 * BLOCK]


@pytest.mark.parametrize("name", ONCE)
def test_a_fault_that_stays_ends_after_bounded_attempts(server: LyingStore, store: RegistryStore, name: str) -> None:
    server.every, code = ONCE[name]
    with pytest.raises(StoreError) as caught:
        fetcher(store).fetch(1, deadline=soon())
    assert caught.value.code == code
    assert len(server.seen()) == QUICK.attempts


def test_wrong_bytes_are_never_handed_on(server: LyingStore, store: RegistryStore) -> None:
    server.faults.append(lie.wrong_bytes)
    assert fetcher(store).fetch(2, deadline=soon()) == DATA[2 * BLOCK :]
    server.every = lie.wrong_bytes
    with pytest.raises(StoreError) as caught:
        fetcher(store).fetch(2, deadline=soon())
    assert caught.value.code == "corrupt"
    assert "block 2" in str(caught.value)
    assert server.url in str(caught.value)


def test_the_whole_object_for_a_range_is_read_and_thrown_away(server: LyingStore, store: RegistryStore) -> None:
    server.every = lie.whole_object
    assert store.read(digest(), BLOCK + 5, 100, deadline=soon()) == DATA[BLOCK + 5 : BLOCK + 105]
    assert fetcher(store).fetch(2, deadline=soon()) == DATA[2 * BLOCK :]


def test_but_not_beyond_a_bound(server: LyingStore, store: RegistryStore, monkeypatch) -> None:
    monkeypatch.setattr("dsec_imagefs.stores.ranges.MAX_DISCARD_BYTES", BLOCK)
    server.every = lie.endless
    assert store.read(digest(), 0, BLOCK, deadline=soon()) == bytes(BLOCK)
    with pytest.raises(StoreError) as caught:
        store.read(digest(), BLOCK, BLOCK, deadline=soon())
    assert caught.value.code == "unsupported"


def test_after_a_false_length_the_connection_is_not_used_again(server: LyingStore, store: RegistryStore) -> None:
    server.faults.append(lambda handler, data, start, end: handler.reply(416, b"no", Content_Length=len(data)))
    begun = time.monotonic()
    with pytest.raises(StoreError):
        store.read(digest(), 0, 10, deadline=soon())
    assert store.read(digest(), 0, 10, deadline=soon()) == DATA[:10]
    assert time.monotonic() - begun < 10, "nobody waited for the body that never comes"


@pytest.mark.parametrize("fault", [lie.dripping_body, lie.dripping_headers, lie.silent])
def test_a_slow_answer_ends_at_the_deadline(server: LyingStore, store: RegistryStore, fault: lie.Fault) -> None:
    server.every = fault
    begun = time.monotonic()
    with pytest.raises(StoreError) as caught:
        store.read(digest(), 0, BLOCK, deadline=soon(0.6))
    assert caught.value.code == "deadline"
    assert time.monotonic() - begun >= 0.5, "it did wait"
    server.every = None
    assert store.read(digest(), 0, BLOCK, deadline=soon()) == DATA[:BLOCK]


def test_one_attempt_that_hangs_leaves_time_for_another(server: LyingStore, store: RegistryStore) -> None:
    server.faults.append(lie.silent)
    impatient = Backoff(attempts=3, base_s=0.001, attempt_s=0.4)
    found = BlockFetcher(store=store, index=fetcher(store).index, wire_digest=digest(), backoff=impatient)
    assert found.fetch(0, deadline=soon()) == DATA[:BLOCK]


def test_a_busy_store_is_left_alone_by_all_threads(server: LyingStore, store: RegistryStore) -> None:
    server.faults.append(lie.status(429, Retry_After="1"))
    begun = time.monotonic()
    with pytest.raises(StoreError) as caught:
        store.read(digest(), 0, 10, deadline=soon(0.5))
    assert caught.value.retry_after_s == 1.0
    with pytest.raises(StoreError) as caught:
        store.size(digest(), deadline=soon(0.3))
    assert caught.value.code == "throttled"
    assert len(server.seen()) == 1, "the second was not even sent"
    assert store.read(digest(), 0, 10, deadline=soon()) == DATA[:10]
    assert time.monotonic() - begun >= 1.0


def test_one_connection_is_enough(server: LyingStore, store: RegistryStore, monkeypatch) -> None:
    opened: list[object] = []
    original = lie.Handler.setup
    monkeypatch.setattr(lie.Handler, "setup", lambda handler: opened.append(handler) or original(handler))
    server.faults.append(lie.redirect("/v2/some/repo/blobs/sha256:" + digest()))
    for _ in range(3):
        assert store.size(digest(), deadline=soon()) == len(DATA)
        assert store.read(digest(), 0, 10, deadline=soon()) == DATA[:10]
    assert len(opened) == 1


def test_a_proxy_is_used_where_the_environment_names_one(monkeypatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:3128")
    monkeypatch.setenv("no_proxy", "inside.example")
    assert type(http.HttpDoor(origin="https://reg.example")._own).__name__ == "ProxyManager"
    assert type(http.HttpDoor(origin="https://inside.example")._own).__name__ == "PoolManager"


# --- tokens


def test_a_token_is_fetched_once_and_used_again(server: LyingStore) -> None:
    server.token = "good"
    store = parse_store(server.url, logins=lambda _: Login(user="me", password="hunter2"))
    for at in range(3):
        assert store.read(digest(), at, 5, deadline=soon()) == DATA[at : at + 5]
    (asked,) = server.seen("/token")
    assert "scope=repository%3Asome%2Frepo%3Apull" in asked[1]
    assert asked[2]["Authorization"].startswith("Basic ")
    store.close()


@pytest.mark.parametrize("status", [401, 403])
def test_an_expired_token_is_renewed_once(server: LyingStore, store: RegistryStore, status: int) -> None:
    server.token = "one"
    assert store.read(digest(), 0, 5, deadline=soon()) == DATA[:5]
    server.token = "two"
    if status == 403:  # as ECR says it at expiry: without a challenge
        server.token = "one"
        server.tokens.extend(["one"])
        server.faults.append(lambda handler, data, start, end: handler.refuse(403))
    assert store.read(digest(), 0, 5, deadline=soon()) == DATA[:5]
    assert len(server.seen("/token")) == 2


def test_a_login_that_is_refused_is_told_without_its_secret(server: LyingStore, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    server.token = "never"
    server.tokens.extend(["no"] * 10)
    store = parse_store(server.url, logins=lambda _: Login(user="me", password="hunter2"))
    with pytest.raises(StoreError) as caught:
        fetcher(store).fetch(0, deadline=soon())  # type: ignore[arg-type]
    assert (caught.value.code, caught.value.retryable) == ("denied", False)
    assert len(server.seen("/token")) == 1, "a refused login is not repeated"
    shown = f"{caught.value!r} {caught.value} {caught.value.__cause__!r} {store!r} {caplog.text}"
    assert "hunter2" not in shown
    store.close()


def test_threads_share_one_renewal(server: LyingStore, store: RegistryStore) -> None:
    from concurrent.futures import ThreadPoolExecutor

    server.token = "good"
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda at: store.read(digest(), at, 5, deadline=soon()), range(24)))
    assert got == [DATA[at : at + 5] for at in range(24)]
    assert len(server.seen("/token")) == 1


# --- redirects to presigned URLs


def test_authorization_stays_at_home(server: LyingStore) -> None:
    with lying_store() as cdn:
        cdn.objects[digest()] = DATA
        server.token = "good"
        store = parse_store(server.url, logins=no_login)
        signed = f"http://{cdn.address}/elsewhere/{digest()}?X-Amz-Signature=s3cr3t"
        server.every = lie.redirect(signed)
        for at in range(3):
            assert store.read(digest(), at, 5, deadline=soon()) == DATA[at : at + 5]
        assert all("Authorization" not in headers for _, _, headers in cdn.requests)
        assert len(cdn.requests) == 3
        assert len(server.seen()) == 2, "one refused, one redirected; then the signed URL is used again"
        store.close()


def test_an_expired_signature_gets_a_new_one(server: LyingStore, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    with lying_store() as cdn:
        cdn.objects[digest()] = DATA
        store = parse_store(server.url, logins=no_login)
        server.every = lie.redirect(f"http://{cdn.address}/elsewhere/{digest()}?X-Amz-Signature=s3cr3t")
        assert store.read(digest(), 0, 5, deadline=soon()) == DATA[:5]
        cdn.faults.append(lie.status(403))
        assert store.read(digest(), 5, 5, deadline=soon()) == DATA[5:10]
        cdn.faults.extend([lie.status(403)] * 3)
        with pytest.raises(StoreError) as caught:
            store.read(digest(), 5, 5, deadline=soon())
        assert caught.value.code == "denied"
        assert "s3cr3t" not in f"{caught.value!r} {caught.value} {caplog.text}"
        assert server.seen("/token") == [], "the registry's own token was not at fault"
        store.close()


def test_redirects_in_a_circle_end(server: LyingStore, store: RegistryStore) -> None:
    server.every = lie.redirect("/v2/some/repo/blobs/sha256:" + digest())
    with pytest.raises(StoreError, match="redirects"):
        store.read(digest(), 0, 5, deadline=soon())
    assert len(server.seen()) <= 6


# --- uploads


@pytest.fixture
def blob(tmp_path):
    data = random.Random(8).randbytes(3500)
    (tmp_path / "blob").write_bytes(data)
    return hashlib.sha256(data).hexdigest(), tmp_path / "blob", data


def test_chunks_go_on_where_a_lost_one_ended(server: LyingStore, store: RegistryStore, blob, monkeypatch) -> None:
    name, path, data = blob
    monkeypatch.setattr(upload.Upload, "__init__", _with_chunks(upload.Upload.__init__, 1000))
    lost = []

    def lose_answer(handler, _data, _start, _end) -> None:
        """The chunk arrives, its answer does not."""
        start = int(handler.headers["Content-Range"].partition("-")[0])
        (upload_data,) = server.uploads.values()
        assert start == len(upload_data)
        upload_data += handler.body()
        lost.append(start)
        server.faults.append(lambda h, *_: h.reply(204, Location=handler.path, Range=f"0-{len(upload_data) - 1}"))
        handler.hang_up()

    original = lie.Handler.do_PATCH

    def second_is_lost(handler) -> None:
        if handler.headers["Content-Range"].startswith("1000-") and not lost:
            server.faults.append(lose_answer)
        original(handler)

    monkeypatch.setattr(lie.Handler, "do_PATCH", second_is_lost)
    assert store.put(name, path, deadline=soon())
    assert server.objects[name] == data
    sent = [headers["Content-Range"] for verb, _, headers in server.requests if verb == "PATCH"]
    assert sent == ["0-999", "1000-1999", "2000-2999", "3000-3499"]


def test_an_upload_that_fails_is_given_up_at_the_registry(server: LyingStore, store: RegistryStore, blob, monkeypatch):
    name, path, _ = blob
    monkeypatch.setattr(upload.Upload, "__init__", _with_chunks(upload.Upload.__init__, 1000))

    def refuse(handler) -> None:
        server.requests.append(("PATCH", handler.path, {}))
        handler.body()
        handler.reply(413)

    monkeypatch.setattr(lie.Handler, "do_PATCH", refuse)
    with pytest.raises(StoreError) as caught:
        store.put(name, path, deadline=soon())
    assert caught.value.code == "no_space"
    assert server.requests[-1][0] == "DELETE"
    assert not store.has(name, deadline=soon())


def test_a_blob_of_another_repository_is_not_sent(server: LyingStore, blob) -> None:
    name, path, _ = blob
    store = parse_store(server.url + "?mount_from=other/repo", logins=no_login)
    server.faults.extend([lie.status(404), lie.status(201)])
    assert store.put(name, path, deadline=soon())
    (posted,) = [row for row in server.requests if row[0] == "POST"]
    assert posted[1].endswith(f"?mount=sha256:{name}&from=other/repo")
    assert [row[0] for row in server.requests] == ["HEAD", "POST"]
    store.close()


def _with_chunks(original, size: int):
    return lambda self, **options: original(self, **(options | {"chunk_bytes": size}))


# --- a store that is down


def test_a_store_that_is_down_is_a_clear_error(server: LyingStore) -> None:
    from tests.kit.store_servers import free_port

    store = parse_store(f"oci://127.0.0.1:{free_port()}/some/repo", logins=no_login)
    with pytest.raises(StoreError) as caught:
        fetcher(store).fetch(0, deadline=soon())  # type: ignore[arg-type]
    assert (caught.value.code, caught.value.retryable) == ("unavailable", True)
    assert "refused" in str(caught.value)
    assert "after 4 attempts" in caught.value.__notes__
