"""S3 that refuses, moves or slows down; a pusher that is killed."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from dsec_imagefs.stores.base import StoreError
from dsec_imagefs.stores.credentials import Login
from dsec_imagefs.stores.parse import parse_store

from tests.kit import lying_store as lie
from tests.kit.abilities import needs
from tests.kit.lying_store import LyingStore, lying_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsec_imagefs.stores.base import Store

pytestmark = pytest.mark.leaks_ok  # the server's threads close their connections in their own time
DATA = bytes(range(256)) * 64
DIGEST = hashlib.sha256(DATA).hexdigest()
ROOT = Path(__file__).parents[3]


@pytest.fixture
def server() -> Iterator[LyingStore]:
    with lying_store() as found:
        found.objects[f"/images/x/objects/{DIGEST}"] = DATA
        yield found


def open_s3(server: LyingStore, logins) -> Store:
    return parse_store(f"s3://images/x?endpoint=http://{server.address}&path_style=true", logins=logins)


def soon(seconds: float = 30.0) -> float:
    return lie.monotonic_in(seconds)


@needs("moto")
def test_a_refused_signature_is_made_again_with_the_keys_of_now(server: LyingStore, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    keys = ["OLDKEY"]
    store = open_s3(server, lambda _: Login(user=keys[0], password="hunter2", token="t0ken"))
    assert store.read(DIGEST, 5, 10, deadline=soon()) == DATA[5:15]
    keys[0] = "NEWKEY"
    assert store.read(DIGEST, 5, 10, deadline=soon()) == DATA[5:15]
    assert "OLDKEY" in server.requests[-1][1], "signed URLs are used again while they are taken"
    server.faults.append(lie.status(403))
    assert store.read(DIGEST, 5, 10, deadline=soon()) == DATA[5:15]
    assert "NEWKEY" in server.requests[-1][1]
    server.faults.extend([lie.status(403)] * 2)
    with pytest.raises(StoreError) as caught:
        store.read(DIGEST, 5, 10, deadline=soon())
    assert (caught.value.code, caught.value.retryable) == ("denied", False)
    shown = f"{caught.value!r} {caught.value} {store!r} {caplog.text}"
    for secret in ("hunter2", "t0ken", "X-Amz-Signature"):
        assert secret not in shown
    store.close()


@needs("moto")
def test_keys_from_an_auth_file_go_before_the_environments(server: LyingStore, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENVKEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "envsecret")
    auth = tmp_path / "auth.json"
    entry = {"auth": base64.b64encode(b"FILEKEY:filesecret").decode(), "identitytoken": "session"}
    for place, key in ((f"{server.address}/images", "FILEKEY"), (f"{server.address}/other", "ENVKEY")):
        auth.write_text(json.dumps({"auths": {place: entry}}))
        url = f"s3://images/x?endpoint=http://{server.address}&path_style=true"
        store = parse_store(url, authfile=str(auth))
        assert store.read(DIGEST, 5, 10, deadline=soon()) == DATA[5:15]
        assert f"X-Amz-Credential={key}" in server.requests[-1][1]
        assert ("X-Amz-Security-Token=session" in server.requests[-1][1]) == (key == "FILEKEY")
        store.close()


@needs("moto")
@pytest.mark.parametrize(
    ("fault", "code", "retryable"),
    [
        (lie.status(503), "unavailable", True),
        (lie.status(503, Retry_After="0"), "throttled", True),
        (lie.status(301), "bad_store", False),
        (lie.redirect("http://127.0.0.1:1/elsewhere"), "bad_store", False),
        (lie.short_body, "short", True),
        (lie.long_body, "bad_reply", True),
        (lie.shifted_range, "bad_reply", True),
        (lie.reset, "short", True),
    ],
)
def test_faults_of_s3_are_told_and_heal(server: LyingStore, fault: lie.Fault, code: str, retryable: bool) -> None:
    store = open_s3(server, lambda _: Login(user="key", password="hunter2"))
    server.faults.append(fault)
    with pytest.raises(StoreError) as caught:
        store.read(DIGEST, 5, 1000, deadline=soon())
    assert (caught.value.code, caught.value.retryable) == (code, retryable)
    assert "hunter2" not in str(caught.value)
    assert store.read(DIGEST, 5, 1000, deadline=soon()) == DATA[5:1005]
    store.close()


_PUSHER = """
import sys, time
from pathlib import Path
from dsec_imagefs.stores.parse import parse_store
store = parse_store(sys.argv[1])
def progress(done, total):
    if done >= total // 2:
        print("half", flush=True)
        time.sleep(60)
store.put(sys.argv[2], Path(sys.argv[3]), deadline=time.monotonic() + 60, progress=progress)
"""


def test_a_pusher_that_is_killed_leaves_nothing_to_be_seen(tmp_path: Path) -> None:
    data = bytes(range(256)) * 16384
    big, url = tmp_path / "big", f"dir:{tmp_path}/store"
    big.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    argv = [sys.executable, "-c", _PUSHER, url, digest, str(big)]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=ROOT)
    assert child.stdout is not None
    assert child.stdout.readline() == b"half\n"
    child.send_signal(signal.SIGKILL)
    child.wait(10)
    child.stdout.close()
    store = parse_store(url)
    assert not store.has(digest, deadline=soon())
    with pytest.raises(StoreError) as caught:
        store.read(digest, 0, 1, deadline=soon())
    assert caught.value.code == "not_found"
    (left,) = (tmp_path / "store/tmp").iterdir()
    assert 0 < left.stat().st_size < len(data)
    assert store.put(digest, big, deadline=soon())
    assert store.read(digest, 0, len(data), deadline=soon()) == data
    assert store.sweep(abandoned_s=-1) == 1  # type: ignore[attr-defined]
