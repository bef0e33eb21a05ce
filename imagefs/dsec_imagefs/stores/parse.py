"""Store URLs: ``dir:/path``, ``s3://bucket/prefix?…``, ``oci://registry/repository?…``."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

from dsec_imagefs.stores.base import StoreError
from dsec_imagefs.stores.credentials import Logins, authfile_logins, find_authfile, no_login
from dsec_imagefs.stores.directory import DirectoryStore
from dsec_imagefs.stores.hedge import HedgedStore
from dsec_imagefs.stores.http import HttpDoor, is_loopback_url
from dsec_imagefs.stores.registry import RegistryStore
from dsec_imagefs.stores.s3 import S3Store
from dsec_imagefs.stores.s3_client import S3Client
from dsec_imagefs.stores.slow import Link, SlowStore
from dsec_imagefs.stores.tokens import Tokens

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsec_imagefs.stores.base import Store

KINDS = "dir:/path, s3://bucket/prefix or oci://registry/repository"
_ALL = ("hedge_ms", "latency_ms", "bandwidth_mib_s")
_OPTIONS = {
    "dir": _ALL,
    "s3": ("endpoint", "region", "path_style", "anonymous", "ca", *_ALL),
    "oci": ("insecure", "mount_from", "ca", *_ALL),
}
_HOST = re.compile(r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9.-]{0,251}[a-zA-Z0-9])?|\[[0-9a-fA-F:.]{2,45}\])(?::\d{1,5})?")
_REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9_.-]+(?:/[A-Za-z0-9_.-]+)*")


def parse_store(
    text: str, *, logins: Logins | None = None, authfile: str = "", environ: Mapping[str, str] | None = None
) -> Store:
    """Turn a store URL into a store; nothing is asked of the network yet.

    Options: for all ``hedge_ms`` (after so long a read is asked a second time; off when not given), ``latency_ms`` and
    ``bandwidth_mib_s`` (both to measure with); for S3 ``endpoint``, ``region``,
    ``path_style``, ``anonymous``, ``ca``; for a registry ``insecure`` (plain HTTP; a registry on loopback may always
    speak it), ``mount_from`` (another repository that has blobs already) and ``ca``.

    Args:
        text: the URL; a URL with a password in it is refused.
        logins: where credentials come from; None means `authfile`, or what podman and botocore would use.
        authfile: a containers-auth.json(5). For S3 its key is ``host/bucket`` (``s3.amazonaws.com/bucket``), user name
            and password are the access key and the secret key, and an ``identitytoken`` is a session's.
        environ: where auth files are looked for; the process's own by default.

    Raises:
        StoreError: ``bad_store`` naming what is wrong; the URL is not quoted, for it may hold a secret.
    """
    kind, _, rest = text.partition(":")
    if text.startswith("/"):
        kind, rest = "dir", text
    if kind not in _OPTIONS or "\0" in text or (kind != "dir" and not rest.startswith("//")):
        raise _bad("this is no store", KINDS)
    rest, _, query = rest.partition("?")
    options = _read_options(query, kind)
    if kind == "dir":
        store: Store = _directory(rest)
    elif kind == "s3":
        store = _s3(rest[2:], options, logins, authfile)
    else:
        if logins is None:
            found = Path(authfile) if authfile else find_authfile(os.environ if environ is None else environ)
            logins = authfile_logins(found) if found else no_login
        store = _registry(rest[2:], options, logins)
    if options.get("latency_ms") or options.get("bandwidth_mib_s"):
        link = Link(
            latency_s=_number(options, "latency_ms") / 1000, bytes_per_s=_number(options, "bandwidth_mib_s") * (1 << 20)
        )
        store = SlowStore(store=store, link=link)
    if options.get("hedge_ms"):
        store = HedgedStore(store=store, after_s=_number(options, "hedge_ms") / 1000)
    return store


def _directory(path: str) -> DirectoryStore:
    if not path.startswith("/"):
        raise _bad(f"a directory store needs an absolute path, not {path[:100]!r}", "dir:/path")
    return DirectoryStore(root=Path(path))


def _s3(rest: str, options: dict[str, str], logins: Logins | None, authfile: str) -> S3Store:
    bucket, _, prefix = _without_user(rest).partition("/")
    prefix = prefix.strip("/")
    if not _BUCKET.fullmatch(bucket) or ".." in bucket:
        raise _bad(f"{bucket[:80]!r} is no bucket", "s3://bucket/prefix")
    if prefix and (not _PREFIX.fullmatch(prefix) or ".." in prefix.split("/")):
        raise _bad(f"{prefix[:80]!r} is no prefix", "letters, digits and . _ - between slashes")
    endpoint = options.get("endpoint", "")
    if endpoint:
        _check_endpoint(endpoint)
    region = options.get("region", "")
    if region and not re.fullmatch(r"[a-z0-9-]{1,40}", region):
        raise _bad(f"{region[:40]!r} is no region", "region=eu-central-1")
    client = S3Client(
        bucket=bucket, endpoint=endpoint, region=region, path_style=_flag(options, "path_style"),
        anonymous=_flag(options, "anonymous"), ca_file=_ca(options),
        logins=authfile_logins(Path(authfile)) if logins is None and authfile else logins, or_else=logins is None,
    )  # fmt: skip
    origin = endpoint or f"https://s3.{region or 'us-east-1'}.amazonaws.com"
    return S3Store(client=client, door=HttpDoor(origin=origin.rstrip("/"), ca_file=_ca(options)), prefix=prefix)


def _registry(rest: str, options: dict[str, str], logins: Logins) -> RegistryStore:
    host, _, repository = _without_user(rest).partition("/")
    if not _HOST.fullmatch(host):
        raise _bad(f"{host[:80]!r} is no registry", "oci://registry[:port]/repository")
    for name in (repository, options.get("mount_from") or repository):
        if len(name) > 255 or not _REPOSITORY.fullmatch(name):
            raise _bad(f"{name[:80]!r} is no repository", "lower-case letters, digits and . _ - between slashes")
    plain = _flag(options, "insecure") or is_loopback_url(f"http://{host}")
    door = HttpDoor(origin=f"{'http' if plain and not options.get('ca') else 'https'}://{host}", ca_file=_ca(options))
    tokens = Tokens(door=door, where=f"{host}/{repository}", repository=repository, logins=logins)
    return RegistryStore(
        door=door, host=host, repository=repository, tokens=tokens, mount_from=options.get("mount_from", "")
    )


def _read_options(query: str, kind: str) -> dict[str, str]:
    known = _OPTIONS[kind]
    options: dict[str, str] = {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=20)
    except ValueError:
        raise _bad("its options can't be read", "?name=value&name=value") from None
    for name, value in pairs:
        if name not in known or name in options:
            what = "is given twice" if name in options else f"is no option of {kind} stores"
            raise _bad(f"{name[:40]!r} {what}", f"there are {', '.join(known)}")
        options[name] = value
    return options


def _without_user(rest: str) -> str:
    if "@" in rest.partition("/")[0]:
        raise _bad("a store URL can't carry credentials", "use an auth file or a secret")
    return rest


def _check_endpoint(endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.username or parts.query or parts.path.strip("/"):
        raise _bad("its endpoint is no URL of a host", "endpoint=https://host[:port]")


def _flag(options: dict[str, str], name: str) -> bool:
    value = options.get(name, "false")
    if value not in ("true", "false"):
        raise _bad(f"{name} is true or false, not {value[:40]!r}", f"{name}=true")
    return value == "true"


def _number(options: dict[str, str], name: str) -> float:
    value = options.get(name) or "0"
    if not re.fullmatch(r"\d{1,9}(\.\d{1,6})?", value):
        raise _bad(f"{name} is a number, not {value[:40]!r}", f"{name}=2")
    return float(value)


def _ca(options: dict[str, str]) -> str:
    path = options.get("ca", "")
    if path and not Path(path).is_file():
        raise _bad(f"ca={path[:100]} is no file", "a file of PEM certificates")
    return path


def _bad(text: str, hint: str) -> StoreError:
    return StoreError("bad_store", text, hint, "store")
