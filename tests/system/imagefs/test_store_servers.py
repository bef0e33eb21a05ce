"""Whole images through real servers: Debian's docker-registry (with logins, with TLS), an S3 server, a slow line."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import random
import shutil
import ssl
import subprocess
import tarfile
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from dsec_imagefs.blob import Blob
from dsec_imagefs.fetch import BlockFetcher
from dsec_imagefs.image import ImageConfig
from dsec_imagefs.layer import Index, build_layer, compose_image
from dsec_imagefs.stores import s3
from dsec_imagefs.stores.base import StoreError
from dsec_imagefs.stores.credentials import Login
from dsec_imagefs.stores.parse import parse_store
from dsec_imagefs.stores.retry import Backoff
from dsec_imagefs.stores.transfer import fetch_blob, pull_image, push_image

from tests.kit.abilities import needs
from tests.kit.lying_store import Handler, LyingStore
from tests.kit.slow_store import slow_store
from tests.kit.store_servers import docker_registry, make_bucket, s3_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsec_imagefs.layer import ImageManifest, Layer
    from dsec_imagefs.stores.base import Store
    from dsec_imagefs.stores.transfer import Pulled

pytestmark = pytest.mark.leaks_ok  # sockets to servers that were killed close in their own time
HUNTER2 = "$2b$04$ZMQHJWgK0QYwINzPti4RZuK8bqddF7k50WfrWixJYyjtW15VIMfjy"  # bcrypt of it, 16 rounds
KEYS = Login(user="key", password="hunter2")


def soon(seconds: float = 50.0) -> float:
    return time.monotonic() + seconds


class Built:
    """An image of two layers, one raw and one zstd, in a directory."""

    def __init__(self, home: Path) -> None:
        self.objects = home / "objects"
        self.objects.mkdir(parents=True)
        rng = random.Random(5)
        layers: list[Layer] = []
        for name, encoding in (("base", "raw"), ("tools", "zstd")):
            archive = home / f"{name}.tar"
            with tarfile.open(archive, "w") as tar:
                for number in range(6):
                    data = rng.randbytes(90_000) + bytes(200_000) + b"text " * 9000
                    entry = tarfile.TarInfo(f"{name}-{number}")
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
            with archive.open("rb") as file:
                blob = Blob(fd=file.fileno(), size=archive.stat().st_size, name=name)
                layers.append(build_layer(blob, self.objects, block_bytes=65536, encoding=encoding))  # type: ignore[arg-type]
        self.layers = tuple(layers)
        self.manifest: ImageManifest = compose_image(
            [(layer, self.objects / layer.meta.digest) for layer in layers],
            self.objects,
            config=ImageConfig(env=("A=b",)),
        )

    def push(self, store: Store, **options):
        objects = self.objects
        return push_image(
            store, self.manifest, self.layers, objects.joinpath, deadline=soon(), names=("a/b:1",), **options
        )


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Built:
    return Built(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as found:
        make_bucket(found, "images")
        yield found


def check_pulled(store: Store, built: Built, home: Path) -> Pulled:
    """Pull by name, fetch every blob through its index, compare with what was built."""
    objects = home / "pulled"
    objects.mkdir()
    pulled = pull_image(store, "a/b:1", objects, deadline=soon())
    assert (pulled.manifest, pulled.layers) == (built.manifest, built.layers)
    for path in objects.iterdir():
        assert path.read_bytes() == (built.objects / path.name).read_bytes()
    for layer in pulled.layers:
        index = Index.parse((objects / layer.index.digest).read_bytes())
        fetcher = BlockFetcher(store=store, index=index, wire_digest=layer.wire.digest)
        fetch_blob(fetcher, home / layer.blob.digest, deadline=soon())
        assert hashlib.sha256((home / layer.blob.digest).read_bytes()).hexdigest() == layer.blob.digest
    return pulled


@needs("docker-registry")
def test_an_image_through_a_registry(built: Built, tmp_path: Path) -> None:
    with docker_registry(tmp_path) as address:
        store = parse_store(f"oci://{address}/team/images")
        first = built.push(store)
        assert first.present == 0
        assert (built.push(store).sent, built.push(store).sent_bytes) == (0, 0)
        check_pulled(store, built, tmp_path)
        store.close()


@needs("docker-registry", "skopeo")
def test_other_tools_see_an_artifact(built: Built, tmp_path: Path) -> None:
    with docker_registry(tmp_path) as address:
        store = parse_store(f"oci://{address}/team/images")
        built.push(store)
        argv = ["skopeo", "inspect", "--raw", "--tls-verify=false", f"docker://{address}/team/images:a_sb_c1"]
        shown = json.loads(subprocess.run(argv, capture_output=True, check=True, timeout=60).stdout)
        assert shown["annotations"] == {"org.nomad-dsec.image": built.manifest.digest}
        kinds = {layer["mediaType"].removeprefix("application/vnd.nomad-dsec.") for layer in shown["layers"]}
        assert kinds == {"layer.v1", "meta.v1", "index.v1", "wire.v1", "merged.v1"}
        copied = tmp_path / "copied"
        argv = ["skopeo", "copy", "--insecure-policy", "--src-tls-verify=false",
                f"docker://{address}/team/images:a_sb_c1", f"dir:{copied}"]  # fmt: skip
        subprocess.run(argv, capture_output=True, check=True, timeout=60)
        assert (copied / built.layers[0].blob.digest).stat().st_size == built.layers[0].blob.size
        store.close()


@needs("docker-registry")
def test_a_registry_with_logins(built: Built, tmp_path: Path) -> None:
    (tmp_path / "htpasswd").write_text(f"me:{HUNTER2}\n")
    with docker_registry(tmp_path, htpasswd=tmp_path / "htpasswd") as address:
        auth = tmp_path / "auth.json"
        url = f"oci://{address}/team/images"
        for password, code in (("wrong", "denied"), (None, "denied"), ("hunter2", "")):
            entry = {"auth": base64.b64encode(f"me:{password}".encode()).decode()}
            auth.write_text(json.dumps({"auths": {address: entry} if password else {}}))
            store = parse_store(url, authfile=str(auth))
            if code:
                with pytest.raises(StoreError) as caught:
                    built.push(store, backoff=Backoff(attempts=2, base_s=0.01))
                assert caught.value.code == code
                assert "hunter2" not in str(caught.value)
            else:
                built.push(store)
                check_pulled(store, built, tmp_path)
            store.close()


@needs("moto")
def test_an_image_through_s3_in_parts(endpoint: str, built: Built, tmp_path: Path) -> None:
    store = parse_store(f"s3://images/team?endpoint={endpoint}&path_style=true", logins=lambda _: KEYS)
    data = random.Random(6).randbytes((11 << 20) + 5)
    (tmp_path / "big").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    steps: list[tuple[int, int]] = []
    assert in_parts(store).put(digest, tmp_path / "big", deadline=soon(), progress=lambda *step: steps.append(step))
    assert [done for done, _ in steps] == [5 << 20, 10 << 20, len(data), len(data)], "three parts"
    assert store.size(digest, deadline=soon()) == len(data)
    assert store.read(digest, (5 << 20) - 7, 100, deadline=soon()) == data[(5 << 20) - 7 : (5 << 20) + 93]
    built.push(store)
    check_pulled(store, built, tmp_path)
    store.close()


@needs("moto")
def test_an_upload_in_parts_that_fails_leaves_nothing(endpoint: str, tmp_path: Path) -> None:
    store = in_parts(parse_store(f"s3://images/lost?endpoint={endpoint}&path_style=true", logins=lambda _: KEYS))
    (tmp_path / "big").write_bytes(bytes(6 << 20))
    digest = hashlib.sha256(bytes(6 << 20)).hexdigest()

    def fails(done: int, total: int) -> None:
        raise StoreError("deadline", "the pusher gave up")

    with pytest.raises(StoreError, match="gave up"):
        store.put(digest, tmp_path / "big", deadline=soon(), progress=fails)
    assert not store.has(digest, deadline=soon())
    assert "Uploads" not in store.client._made().list_multipart_uploads(Bucket="images")
    store.close()


def in_parts(store: Store) -> s3.S3Store:
    """The same store, with the smallest parts S3 takes."""
    assert isinstance(store, s3.S3Store)
    return s3.S3Store(client=store.client, door=store.door, prefix=store.prefix, part_bytes=5 << 20)


@needs("moto")
def test_a_bucket_that_is_not_there(endpoint: str) -> None:
    url = f"s3://nowhere/x?endpoint={endpoint}&path_style=true"
    store = parse_store(url, logins=lambda _: KEYS)
    with pytest.raises(StoreError) as caught:
        store.read("ab" * 32, 0, 1, deadline=soon())
    assert caught.value.code == "not_found"
    with pytest.raises(StoreError) as caught:
        store.refs(deadline=soon())
    assert caught.value.code == "not_found"
    nobody = parse_store(url, logins=lambda _: None)
    with pytest.raises(StoreError) as caught:
        nobody.read("ab" * 32, 0, 1, deadline=soon())
    assert caught.value.code == "denied"
    store.close()
    nobody.close()


def test_an_image_through_a_slow_line(built: Built, tmp_path: Path) -> None:
    built.push(parse_store(f"dir:{tmp_path}/store"))
    with slow_store(tmp_path / "store", latency_ms=1, mib_s=400) as slow:
        store = parse_store(slow.url)
        pulled = check_pulled(store, built, tmp_path)
        traffic = slow.traffic()
        needed = sum(layer.wire.size + layer.index.size + layer.meta.size for layer in pulled.layers)
        assert needed * 0.5 < traffic["sent_bytes"] < needed * 1.2 + 100_000, "zeros are not sent, nothing comes twice"
        store.close()


def test_who_pins_a_digest_need_not_believe_the_merged_image(built: Built, tmp_path: Path) -> None:
    """A store swaps the merged image for another; the digest does not show it, merging anew does."""
    store = parse_store(f"dir:{tmp_path}/store")
    built.push(store)
    other = compose_image([(built.layers[0], built.objects / built.layers[0].meta.digest)], built.objects)
    swapped = replace(built.manifest, merged=other.merged)
    store.put(other.merged.digest, built.objects / other.merged.digest, deadline=soon())
    store.put_image(swapped.digest, swapped.render(), [], deadline=soon())
    for remerge, merged in ((False, other.merged), (True, built.manifest.merged)):
        objects = tmp_path / f"pulled-{remerge}"
        objects.mkdir()
        pulled = pull_image(store, built.manifest.digest, objects, deadline=soon(), remerge=remerge)
        assert pulled.image == built.manifest.digest
        assert pulled.manifest.merged == merged
        assert hashlib.sha256((objects / merged.digest).read_bytes()).hexdigest() == merged.digest


# --- TLS


@contextmanager
def secure_registry(home: Path) -> Iterator[tuple[str, LyingStore]]:
    """Our own server behind TLS with a certificate of its own making."""
    key, cert = home / "key.pem", home / "cert.pem"
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(cert),
            "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]  # fmt: skip
    subprocess.run(argv, capture_output=True, check=True, timeout=60)
    lying = LyingStore()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"lying": lying}))
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"localhost:{server.server_address[1]}", lying
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


@needs("openssl")
def test_only_a_known_certificate_is_spoken_to(tmp_path: Path) -> None:
    with secure_registry(tmp_path) as (address, lying):
        digest = lying.add(b"over TLS")
        known = parse_store(f"oci://{address}/some/repo?ca={tmp_path}/cert.pem")
        assert known.read(digest, 5, 3, deadline=soon()) == b"TLS"
        shutil.copy("/etc/ssl/certs/ca-certificates.crt", tmp_path / "others.pem")
        lying.requests.clear()
        unknown = parse_store(f"oci://{address}/some/repo?ca={tmp_path}/others.pem")
        with pytest.raises(StoreError) as caught:
            unknown.read(digest, 5, 3, deadline=soon())
        assert (caught.value.code, caught.value.retryable) == ("unavailable", False)
        assert "certificate" in str(caught.value)
        assert lying.requests == [], "not a byte was sent"
        known.close()
        unknown.close()
