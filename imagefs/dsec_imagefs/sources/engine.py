"""Images of a local Docker engine, by the docker SDK's save verb."""

from __future__ import annotations

import os
import socket
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsec_imagefs.errors import ImageError
from dsec_imagefs.sources.archive import ArchiveSource

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsec_imagefs.sources.base import Material, Work

_DEFAULT_HOST = "unix:///var/run/docker.sock"
_CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSource:
    """``docker-daemon:REF``: an image of the local Docker engine, by its save verb."""

    ref: str

    @property
    def label(self) -> str:
        """The source string."""
        return f"docker-daemon:{self.ref}"

    @property
    def cache_key(self) -> str:
        """A tag may have moved: nothing to reuse."""
        return ""

    @contextmanager
    def open(self, work: Work) -> Iterator[Material]:
        """Have the engine save the image into scratch space, then read it like any docker-archive."""
        import docker
        import docker.errors
        import requests

        if problem := _unreachable():
            raise ImageError("tool_failed", f"no Docker engine: {problem}", "start it, or set DOCKER_HOST", "source")
        archive = work.tmp / "engine.tar"
        try:
            client = docker.from_env()
            try:
                image = client.images.get(self.ref)
                done = 0
                with archive.open("xb") as out:
                    for piece in image.save(chunk_size=1 << 20):
                        out.write(piece)
                        done += len(piece)
                        work.progress("fetch", done, int(image.attrs.get("Size") or 0))
            finally:
                client.close()
        except docker.errors.ImageNotFound as err:
            raise ImageError("not_found", f"the Docker engine has no image {self.ref!r}", field="source") from err
        except (docker.errors.DockerException, requests.RequestException) as err:
            raise ImageError("tool_failed", f"the Docker engine: {err}", "is it running?", "source") from err
        with ArchiveSource(kind="docker-archive", path=str(archive), shown=self.label).open(work) as material:
            yield material


def probe_engine() -> str:
    """Try to reach a local Docker engine: "" when it answers, else why not."""
    import docker
    import docker.errors
    import requests

    if problem := _unreachable():
        return f"no Docker engine: {problem}"
    try:
        client = docker.from_env(timeout=5)
        try:
            client.ping()
        finally:
            client.close()
    except (docker.errors.DockerException, requests.RequestException) as err:
        return f"no Docker engine: {err}"
    return ""


def _unreachable() -> str:
    """Why a local engine's socket takes no connection, or "". The SDK would leave a descriptor open on each failure."""
    host = os.environ.get("DOCKER_HOST") or _DEFAULT_HOST
    if not host.startswith("unix://"):
        return ""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        try:
            probe.connect(host.removeprefix("unix://"))
        except OSError as err:
            return f"{host}: {err.strerror or err}"
    return ""
