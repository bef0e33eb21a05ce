"""A certificate authority of a test's own, by openssl(1): server and client certificates for 127.0.0.1."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

NAMES = "subjectAltName=IP:127.0.0.1,DNS:localhost"


def _openssl(*argv: str) -> None:
    subprocess.run(["openssl", *argv], check=True, capture_output=True, timeout=60)


def make_ca(directory: Path) -> Path:
    """ca.pem (its key beside it); a directory holds one."""
    directory.mkdir(parents=True, exist_ok=True)
    ca = directory / "ca.pem"
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    _openssl("req", "-x509", *new_key, "-days", "2", "-subj", "/CN=ca", "-keyout", f"{ca}.key", "-out", str(ca))
    return ca


def make_pair(ca: Path, name: str) -> tuple[Path, Path]:
    """Certificate and key, signed by the authority."""
    cert, key, request, more = (ca.parent / f"{name}{end}" for end in (".pem", ".key", ".csr", ".ext"))
    more.write_text(NAMES + "\n")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    _openssl("req", *new_key, "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(request))
    signing = ("-CA", str(ca), "-CAkey", f"{ca}.key", "-CAcreateserial", "-days", "2", "-extfile", str(more))
    _openssl("x509", "-req", "-in", str(request), *signing, "-out", str(cert))
    return cert, key
