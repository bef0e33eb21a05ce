"""Rules of stores without a store: names, URLs, credentials, challenges, ranges, repetition, artifacts."""

from __future__ import annotations

import base64
import json
import time
from email.utils import formatdate

import pytest
from dsec_imagefs.errors import ImageError
from dsec_imagefs.image import normal_name
from dsec_imagefs.stores import artifact
from dsec_imagefs.stores.base import StoredObject, StoreError, escape_name, plain_hex, unescape_name
from dsec_imagefs.stores.credentials import Login, authfile_logins, find_authfile, parse_authfile
from dsec_imagefs.stores.directory import DirectoryStore
from dsec_imagefs.stores.hedge import HedgedStore
from dsec_imagefs.stores.http import HttpDoor, is_private_to_host
from dsec_imagefs.stores.parse import parse_store
from dsec_imagefs.stores.ranges import check_content_range, parse_retry_after, render_range, status_error
from dsec_imagefs.stores.registry import RegistryStore
from dsec_imagefs.stores.retry import Backoff, Pacer, Ticker, retry
from dsec_imagefs.stores.s3 import S3Store
from dsec_imagefs.stores.slow import Link, SlowStore
from dsec_imagefs.stores.tokens import parse_challenge
from hypothesis import given
from hypothesis import strategies as st

IMAGE = "ab" * 32
NAMES = st.from_regex(r"[a-zA-Z0-9][a-zA-Z0-9._/@-]{0,40}:[a-zA-Z0-9_][a-zA-Z0-9._-]{0,20}", fullmatch=True)


class FakeTime:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.at = 1000.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.at += seconds

    @property
    def ticker(self) -> Ticker:
        return Ticker(now=lambda: self.at, sleep=self.sleep, chance=lambda: 0.5)


# --- names


@given(NAMES)
def test_a_name_is_one_word_and_comes_back(name: str) -> None:
    word = escape_name(name)
    assert set(word) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
    assert unescape_name(word) == name
    assert artifact.tag_name(artifact.name_tag(name)) == name


@given(NAMES, NAMES)
def test_two_names_are_two_words(one: str, other: str) -> None:
    assert (escape_name(one) == escape_name(other)) == (one == other)


@pytest.mark.parametrize(
    "name", ["", "../etc", ".hidden", "-rf", "a b", "a\0b", "a\nb", "é", "a%2fb", "x" * 200, "_" * 65]
)
def test_no_other_name_gets_in(name: str) -> None:
    with pytest.raises(StoreError) as caught:
        escape_name(name)
    assert (caught.value.code, caught.value.field) == ("bad_name", "name")


@pytest.mark.parametrize("word", ["", "_", "a_", "a_x", "image-" + IMAGE, "trace-" + IMAGE])
def test_words_that_are_no_names(word: str) -> None:
    assert artifact.tag_name(word) is None


def test_a_name_can_not_pass_for_an_image() -> None:
    with pytest.raises(StoreError, match="reserved"):
        artifact.name_tag("image-" + IMAGE)
    assert artifact.tag_name(artifact.name_tag(normal_name("image-" + IMAGE))) == f"image-{IMAGE}:latest"


@pytest.mark.parametrize("digest", ["", "AB" * 32, "ab" * 31, "../" + "a" * 61, "sha512:" + "ab" * 32, IMAGE + "\n"])
def test_what_is_no_digest(digest: str) -> None:
    with pytest.raises(StoreError):
        plain_hex(digest)


def test_a_digest_with_and_without_its_algorithm() -> None:
    assert plain_hex("sha256:" + IMAGE) == plain_hex(IMAGE) == IMAGE


# --- URLs


def test_each_kind_of_store(tmp_path) -> None:
    directory = parse_store(f"dir:{tmp_path}")
    assert isinstance(directory, DirectoryStore)
    assert directory.root == tmp_path
    assert isinstance(parse_store(str(tmp_path)), DirectoryStore)
    registry = parse_store("oci://reg.example:5000/team/images?mount_from=team/base", environ={})
    assert isinstance(registry, RegistryStore)
    assert (registry.door.origin, registry.repository) == ("https://reg.example:5000", "team/images")
    assert registry.mount_from == "team/base"
    bucket = parse_store("s3://my-bucket/a/b/?endpoint=https://minio:9000&region=eu-central-1&path_style=true")
    assert isinstance(bucket, S3Store)
    assert (bucket.label, bucket.client.endpoint) == ("s3://my-bucket/a/b", "https://minio:9000")


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("oci://127.0.0.1:5000/a", "http://127.0.0.1:5000"),
        ("oci://localhost/a", "http://localhost"),
        ("oci://reg.example/a?insecure=true", "http://reg.example"),
        ("oci://reg.example/a", "https://reg.example"),
        ("oci://127.0.0.1.evil.example/a", "https://127.0.0.1.evil.example"),
    ],
)
def test_plain_http_is_for_this_machine_or_asked_for(url: str, origin: str) -> None:
    store = parse_store(url, environ={})
    assert isinstance(store, RegistryStore)
    assert store.door.origin == origin


def test_a_slow_store_to_measure_with(tmp_path) -> None:
    store = parse_store(f"dir:{tmp_path}?latency_ms=2&bandwidth_mib_s=100")
    assert isinstance(store, SlowStore)
    assert (store.link.latency_s, store.link.bytes_per_s) == (0.002, 100 << 20)
    hedged = parse_store(f"dir:{tmp_path}?hedge_ms=250&latency_ms=1")
    assert isinstance(hedged, HedgedStore)
    assert hedged.after_s == 0.25
    assert isinstance(hedged.store, SlowStore)
    hedged.close()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "no store"),
        ("ftp://x/y", "no store"),
        ("oci:reg/x", "no store"),
        ("dir:relative", "absolute"),
        ("oci://reg/UPPER", "no repository"),
        ("oci://reg/a/../b", "no repository"),
        ("oci://reg", "no repository"),
        ("oci:///x", "no registry"),
        ("oci://user:hunter2@reg/x", "credentials"),
        ("s3://key:hunter2@bucket/x", "credentials"),
        ("s3://b", "no bucket"),
        ("s3://bucket/../x", "no prefix"),
        ("s3://bucket?endpoint=file:///etc", "endpoint"),
        ("s3://bucket?endpoint=http://u:hunter2@h", "endpoint"),
        ("oci://reg/x?colour=blue", "no option"),
        ("oci://reg/x?insecure=true&insecure=true", "twice"),
        ("oci://reg/x?insecure=maybe", "true or false"),
        ("oci://reg/x?ca=/nonexistent", "no file"),
        ("dir:/x?latency_ms=soon", "number"),
    ],
)
def test_a_bad_url_names_what_is_wrong_and_no_secret(url: str, says: str) -> None:
    with pytest.raises(StoreError) as caught:
        parse_store(url, environ={})
    assert (caught.value.code, caught.value.field) == ("bad_store", "store")
    assert says in str(caught.value)
    assert "hunter2" not in str(caught.value)


# --- credentials


def _auth(user: str, password: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


def test_the_longest_match_of_an_auth_file_counts() -> None:
    raw = json.dumps(
        {
            "auths": {
                "h:5000": _auth("host", "1"),
                "h:5000/team": _auth("team", "2"),
                "https://index/v1/": _auth("d", "3"),
            }
        }
    ).encode()
    assert parse_authfile(raw, "h:5000/team/x", "f") == Login(user="team", password="2")
    assert parse_authfile(raw, "h:5000/teamster", "f") == Login(user="host", password="1")
    assert parse_authfile(raw, "index/x", "f") == Login(user="d", password="3")
    assert parse_authfile(raw, "other/x", "f") is None


def test_an_auth_file_is_read_at_each_need(tmp_path) -> None:
    path = tmp_path / "auth.json"
    path.write_text(json.dumps({"auths": {"h": _auth("a", "old")}}))
    logins = authfile_logins(path)
    assert logins("h/x") == Login(user="a", password="old")
    path.write_text(json.dumps({"auths": {"h": _auth("a", "new:with:colons")}}))
    assert logins("h/x") == Login(user="a", password="new:with:colons")
    path.unlink()
    with pytest.raises(StoreError, match="can't be read"):
        logins("h/x")


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"auths": {"h": {"auth": "%%%"}}}', b'{"auths": {"h": 5}}', b"\xff"])
def test_no_auth_file(raw: bytes) -> None:
    with pytest.raises(StoreError, match="no auth file"):
        parse_authfile(raw, "h/x", "f")


def test_a_helper_program_is_not_run() -> None:
    raw = json.dumps({"auths": {"h": {}}, "credsStore": "desktop"}).encode()
    with pytest.raises(StoreError, match="helper program"):
        parse_authfile(raw, "h/x", "f")
    assert parse_authfile(raw, "other/x", "f") is None


def test_where_auth_files_are_looked_for(tmp_path) -> None:
    path = tmp_path / ".docker/config.json"
    path.parent.mkdir()
    path.write_text("{}")
    assert find_authfile({"HOME": str(tmp_path)}) == path
    named = tmp_path / "named.json"
    named.write_text("{}")
    assert find_authfile({"HOME": str(tmp_path), "REGISTRY_AUTH_FILE": str(named)}) == named
    assert find_authfile({"HOME": str(tmp_path / "empty")}) is None


def test_a_login_does_not_show_itself() -> None:
    assert "hunter2" not in repr(Login(user="u", password="hunter2", token="hunter2"))
    store = parse_store("oci://h/x", logins=lambda _: Login(user="u", password="hunter2"))
    assert "hunter2" not in repr(store)


# --- replies


def test_a_challenge() -> None:
    found = parse_challenge('Bearer realm="https://a.example/token",service="r e g",scope="repository:x:pull,push"')
    assert found is not None
    assert (found.scheme, found.realm, found.endpoint) == ("bearer", "https://a.example/token", "r e g")
    assert parse_challenge("basic realm=x").scheme == "basic"  # type: ignore[union-attr]
    assert parse_challenge("Negotiate abc") is None
    assert parse_challenge("") is None


@given(st.text(max_size=300))
def test_any_challenge_is_read_or_not(value: str) -> None:
    parse_challenge(value)
    parse_challenge("Bearer " + value)


def test_a_range_is_exact() -> None:
    assert render_range(4096, 10) == "bytes=4096-4105"
    check_content_range({"Content-Range": "bytes 5-9/20", "Content-Length": "5"}, 5, 5, "x")
    check_content_range({"Content-Range": "bytes 5-9/*"}, 5, 5, "x")


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "bad_reply"),
        ({"Content-Range": "bytes 0-4/20"}, "bad_reply"),
        ({"Content-Range": "bytes 5-8/9"}, "short"),
        ({"Content-Range": "bytes 5-10/20"}, "bad_reply"),
        ({"Content-Range": "bytes */20"}, "bad_reply"),
        ({"Content-Range": "bytes 5-9/20", "Content-Length": "6"}, "bad_reply"),
        ({"Content-Range": "bytes 5-9/20, 5-9/20"}, "bad_reply"),
        ({"Content-Range": "bytes " + "9" * 5000 + "-9/20"}, "bad_reply"),
    ],
)
def test_another_range_is_refused(headers: dict[str, str], code: str) -> None:
    with pytest.raises(StoreError) as caught:
        check_content_range(headers, 5, 5, "x")
    assert caught.value.code == code
    assert caught.value.retryable
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("status", "code", "retryable"),
    [
        (404, "not_found", False), (401, "denied", False), (403, "denied", False), (405, "unsupported", False),
        (408, "unavailable", True), (416, "short", True), (429, "throttled", True), (500, "unavailable", True),
        (502, "unavailable", True), (503, "unavailable", True), (507, "no_space", False), (418, "bad_reply", False),
        (599, "bad_reply", True), (302, "bad_reply", False),
    ],
)  # fmt: skip
def test_what_a_status_says(status: int, code: str, retryable: bool) -> None:
    error = status_error(status, {}, "x")
    assert (error.code, error.retryable) == (code, retryable)


def test_retry_after() -> None:
    assert parse_retry_after("7") == 7.0
    assert 50 < (parse_retry_after(formatdate(time.time() + 60, usegmt=True)) or 0) <= 60
    assert parse_retry_after(formatdate(time.time() - 60, usegmt=True)) == 0.0
    for value in ("", "-1", "soon", "9" * 400, "1e9", "٣"):
        assert parse_retry_after(value) is None
    assert status_error(503, {"Retry-After": "3"}, "x").retry_after_s == 3.0


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "::1", "169.254.169.254", "fe80::1%eth0", "0.0.0.0", "::ffff:169.254.169.254", "fd00:ec2::254",
     "100.100.100.200", "224.0.0.1"],
)  # fmt: skip
def test_addresses_of_the_machine_itself(address: str) -> None:
    assert is_private_to_host(address)


@pytest.mark.parametrize("address", ["10.0.0.1", "192.168.1.1", "8.8.8.8", "2001:db8::1", "fd12::1"])
def test_addresses_a_store_may_have(address: str) -> None:
    assert not is_private_to_host(address)


@pytest.mark.parametrize(
    "location",
    ["file:///etc/passwd", "ftp://x/", "http://cdn.example/", "https://169.254.169.254/latest", "https://[::1]/",
     "https://localhost.localdomain@127.0.0.1/", "https://u:p@cdn.example/", "gopher://x", "https://127.1.2.3:80/"],
)  # fmt: skip
def test_where_a_redirect_may_not_lead(location: str) -> None:
    door = HttpDoor(origin="https://reg.example")
    with pytest.raises(StoreError) as caught:
        door.redirect_target("https://reg.example/v2/x", location, "x")
    assert caught.value.code == "denied"
    assert not caught.value.retryable


def test_where_a_redirect_may_lead() -> None:
    door = HttpDoor(origin="https://reg.example")
    assert door.redirect_target("https://reg.example/v2/x", "/y?z", "x") == "https://reg.example/y?z"
    assert door.redirect_target("https://reg.example/v2/x", "https://cdn.example/y", "x") == "https://cdn.example/y"


# --- repetition


def _failing(count: int, **how):
    left = [count]

    def call(_until: float) -> str:
        if left[0]:
            left[0] -= 1
            raise StoreError(how.pop("code", "unavailable"), "x", retryable=how.get("retryable", True),
                             retry_after_s=how.get("retry_after_s"))  # fmt: skip
        return "done"

    return call


def test_it_is_tried_again_with_longer_waits() -> None:
    clock = FakeTime()
    assert retry(_failing(4), deadline=2000.0, ticker=clock.ticker) == "done"
    assert clock.slept == [0.05, 0.1, 0.2, 0.4]


def test_attempts_are_bounded() -> None:
    clock = FakeTime()
    with pytest.raises(StoreError) as caught:
        retry(_failing(100), deadline=1e9, backoff=Backoff(attempts=3), ticker=clock.ticker)
    assert len(clock.slept) == 2
    assert caught.value.__notes__ == ["after 3 attempts"]


def test_what_can_not_heal_is_not_tried_again() -> None:
    clock = FakeTime()
    with pytest.raises(StoreError):
        retry(_failing(1, retryable=False), deadline=2000.0, ticker=clock.ticker)
    assert clock.slept == []


def test_no_attempt_and_no_wait_goes_beyond_the_deadline() -> None:
    clock = FakeTime()
    given: list[float] = []

    def call(until: float) -> None:
        given.append(until)
        clock.at += 3.0
        raise StoreError("unavailable", "x", retryable=True)

    with pytest.raises(StoreError):
        retry(call, deadline=1010.0, backoff=Backoff(attempts=99, attempt_s=4.0, base_s=2.0), ticker=clock.ticker)
    assert given[0] == 1004.0
    assert max(given) == 1010.0
    assert clock.at <= 1010.0 + 3.0


def test_a_stores_wish_to_wait_is_heard() -> None:
    clock = FakeTime()
    assert retry(_failing(1, retry_after_s=7.0), deadline=2000.0, ticker=clock.ticker) == "done"
    assert clock.slept == [7.05]
    with pytest.raises(StoreError):
        retry(_failing(1, retry_after_s=7.0), deadline=clock.at + 5, ticker=clock.ticker)


def test_a_host_that_is_busy_is_left_alone_by_all() -> None:
    clock = FakeTime()
    pacer = Pacer(ticker=clock.ticker)
    pacer.wait_free(2000.0, "x")
    assert clock.slept == []
    pacer.hold(5.0)
    with pytest.raises(StoreError, match="asked to wait"):
        pacer.wait_free(1003.0, "x")
    pacer.wait_free(2000.0, "x")
    assert clock.slept == [5.0]
    pacer.hold(1e9)  # a hostile host
    pacer.wait_free(1e9, "x")
    assert clock.slept[-1] == 120.0


def test_a_link_has_latency_and_shares_its_bandwidth() -> None:
    clock = FakeTime()
    link = Link(latency_s=0.5, bytes_per_s=100.0, ticker=clock.ticker)
    link.pass_bytes(100, 2000.0, "x")
    assert clock.slept == [1.5]
    with pytest.raises(StoreError) as caught:
        link.pass_bytes(1000, clock.at + 2.0, "x")
    assert (caught.value.code, clock.slept[-1]) == ("deadline", 2.0)


# --- artifacts


def _objects() -> list[StoredObject]:
    return [StoredObject(digest="cd" * 32, size=5, kind="wire"), StoredObject(digest="ef" * 32, size=7, kind="meta")]


def test_an_artifact_names_every_object_once() -> None:
    raw = artifact.render_image(IMAGE, b"{}", [*_objects(), *_objects()])
    found = json.loads(raw)
    assert [row["digest"] for row in found["layers"]] == ["sha256:" + "cd" * 32, "sha256:" + "ef" * 32]
    assert found["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    image, item = artifact.parse_image(raw, "x")
    assert (image, item.size, item.kind) == (IMAGE, 2, "image")
    trace = artifact.render_trace(IMAGE, b"abc")
    assert artifact.parse_trace(trace, "x")[1].size == 3
    with pytest.raises(StoreError):
        artifact.parse_image(trace, "x")


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: d.pop("annotations"), lambda d: d.pop("config"), lambda d: d["config"].pop("size"),
        lambda d: d["config"].update(size=-1), lambda d: d["config"].update(size="7"),
        lambda d: d["config"].update(digest="sha256:../../etc"), lambda d: d.update(config=[]),
        lambda d: d["annotations"].update({artifact.IMAGE_KEY: "../x"}), lambda d: d.update(annotations="x"),
        lambda d: d["config"].update(mediaType="application/vnd.oci.image.config.v1+json"),
    ],
)  # fmt: skip
def test_a_damaged_artifact_is_refused(edit) -> None:
    document = json.loads(artifact.render_image(IMAGE, b"{}", _objects()))
    edit(document)
    with pytest.raises(StoreError) as caught:
        artifact.parse_image(json.dumps(document).encode(), "x")
    assert caught.value.code == "bad_reply"


@given(st.binary(max_size=200))
def test_any_bytes_are_an_artifact_or_refused(raw: bytes) -> None:
    with pytest.raises(ImageError):
        artifact.parse_image(raw, "x")
    with pytest.raises(ImageError):
        artifact.parse_image(b"[" * 100_000, "x")
