"""Real servers of stores on loopback: Debian's docker-registry, and moto for S3. Each a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

START_S = 30.0
_REGISTRY = """version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage:
  filesystem: {{rootdirectory: {root}}}
  delete: {{enabled: true}}
  maintenance: {{uploadpurging: {{enabled: false}}}}
http: {{addr: "127.0.0.1:{port}", secret: for-tests}}
{auth}
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextmanager
def docker_registry(directory: Path, *, htpasswd: Path | None = None) -> Iterator[str]:
    """The real registry; yields ``127.0.0.1:PORT``."""
    port, config = free_port(), directory / "registry.yml"
    auth = f"auth: {{htpasswd: {{realm: test, path: {htpasswd}}}}}" if htpasswd else ""
    config.write_text(_REGISTRY.format(root=directory / "registry", port=port, auth=auth))
    with _running(["docker-registry", "serve", str(config)], {}, f"http://127.0.0.1:{port}/v2/"):
        yield f"127.0.0.1:{port}"


@contextmanager
def s3_server() -> Iterator[str]:
    """moto's S3, in memory; yields ``http://127.0.0.1:PORT``."""
    port = free_port()
    argv = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _running(argv, {"MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(64 << 20)}, f"http://127.0.0.1:{port}/moto-api/"):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def _running(argv: Sequence[str], extra: Mapping[str, str], url: str) -> Iterator[None]:
    environ = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "OTEL_TRACES_EXPORTER": "none", **extra}
    child = subprocess.Popen(argv, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_up(child, url)
        yield
    finally:
        child.kill()
        child.wait(10)


def _wait_up(child: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_S
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        try:
            with opener.open(url, timeout=2):
                return
        except urllib.error.HTTPError as error:
            error.close()
            return  # it answers: 401 is an answer
        except OSError:
            assert child.poll() is None, f"{child.args} ended with {child.returncode}"
            assert time.monotonic() < deadline, f"{child.args} did not come up"
            time.sleep(0.05)


def make_bucket(endpoint: str, bucket: str) -> None:
    """Make a bucket by botocore, with any keys."""
    import botocore.session

    session = botocore.session.Session()
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
    client = session.create_client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys)
    client.create_bucket(Bucket=bucket)
    client.close()
