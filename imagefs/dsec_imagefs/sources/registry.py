"""Images of a registry, fetched by skopeo(1) into scratch space as an OCI layout."""

from __future__ import annotations

import os
import re
import time
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
FETCH_ATTEMPTS = 3  # skopeo's own retries cover lost connections, not a registry's 5xx
RETRY_PAUSE_S = 0.5
_FINAL = re.compile("unauthorized|denied|authentication required|unknown|invalid reference|did not end within")
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
        for attempt in range(1, FETCH_ATTEMPTS + 1):
            try:
                run_tool(argv, timeout_s=FETCH_TIMEOUT_S, on_line=on_line, env=env)
                break
            except ImageError as err:
                if attempt == FETCH_ATTEMPTS or _FINAL.search(err.message):
                    raise
                time.sleep(RETRY_PAUSE_S * attempt)  # layers that came whole stay in the layout
        with ArchiveSource(kind="oci", path=str(layout), ref="image", shown=self.label).open(work) as material:
            yield material
