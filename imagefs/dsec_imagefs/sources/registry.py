"""Images of a registry, fetched by skopeo(1) into scratch space as an OCI layout, and of a local Docker engine."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dsec_imagefs.errors import ImageError
from dsec_imagefs.sources.archive import ArchiveSource
from dsec_imagefs.tools import need_tool, run_tool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsec_imagefs.sources.base import Material, Work

FETCH_TIMEOUT_S = 3600.0
_REF = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._:/@-]{0,400}")
_LOOPBACK = re.compile(r"(?:localhost|127(?:\.\d{1,3}){3})(?::\d+)?/")
_POLICY = Path("/etc/containers/policy.json")


def check_ref(ref: str) -> str:
    """A reference of a registry or engine; raises ImageError ``bad_source`` also for one that carries credentials."""
    host = ref.partition("/")[0]
    if "@" in host and not re.search(r"@sha(?:256|512):[0-9a-f]+$", host):
        raise ImageError("bad_source", "a reference can't carry credentials", "use an auth file", "source")
    if not _REF.fullmatch(ref):
        raise ImageError("bad_source", f"{ref!r} is no image reference", "docker://registry/name:tag", "source")
    return ref


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrySource:
    """``docker://REF``. Credentials come from an auth file (containers-auth.json(5)), never from an argument."""

    ref: str
    authfile: str = ""

    @property
    def label(self) -> str:
        """The source string."""
        return f"docker://{self.ref}"

    @property
    def cache_key(self) -> str:
        """A tag may have moved: nothing to reuse."""
        return ""

    @contextmanager
    def open(self, work: Work) -> Iterator[Material]:
        """Fetch all layers, then read them like any OCI layout."""
        skopeo = need_tool("skopeo", "skopeo")
        layout = work.tmp / "layout"
        argv = [skopeo, "--override-os", "linux"]
        if not _POLICY.exists():  # without a policy file skopeo would refuse everything; with one, the host decides
            argv.append("--insecure-policy")
        argv += ["copy", "--retry-times", "3", "--dest-oci-accept-uncompressed-layers"]
        if self.authfile:
            argv += ["--src-authfile", self.authfile]
        if _LOOPBACK.match(self.ref):  # as Docker does: a registry of this very machine may speak plain HTTP
            argv.append("--src-tls-verify=false")
        keep = ("HOME", "XDG_RUNTIME_DIR", "REGISTRY_AUTH_FILE", "SSL_CERT_FILE", "SSL_CERT_DIR")
        env = {key: os.environ[key] for key in keep if key in os.environ}
        blobs = 0

        def on_line(line: str) -> None:
            nonlocal blobs
            if line.startswith("Copying blob"):
                blobs += 1
                work.progress("fetch", blobs, 0)

        argv += [self.label, f"oci:{layout}:image"]
        run_tool(argv, timeout_s=FETCH_TIMEOUT_S, on_line=on_line, env=env)
        with ArchiveSource(kind="oci", path=str(layout), ref="image", shown=self.label).open(work) as material:
            yield material


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

    try:
        client = docker.from_env(timeout=5)
        try:
            client.ping()
        finally:
            client.close()
    except (docker.errors.DockerException, requests.RequestException) as err:
        return f"no Docker engine: {err}"
    return ""
