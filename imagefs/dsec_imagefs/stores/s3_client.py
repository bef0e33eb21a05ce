"""What botocore does for the S3 store: find credentials, sign, list, and begin and end uploads in parts.

Why botocore: it alone knows every way AWS and its users hand out credentials, and it signs for all S3-compatible
stores; it is pure Python on the urllib3 we have. Its own transfers are not used: it reads a body without regard to a
deadline, and the exact-range rule of `ranges` should hold for all stores. So URLs are signed here and used by `http`.
(obstore, minio: fewer ways to credentials, and no look at a reply's status and headers.)
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dsec_imagefs.stores.base import StoreError, remaining
from dsec_imagefs.stores.ranges import status_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsec_imagefs.stores.credentials import Logins

EXPIRES_S = 900
KEEP_S = 300.0  # signed URLs are used again for this long: signing takes longer than a small read
MAX_KEPT = 1024
PAGE_KEYS = 1000


@dataclass(slots=True, kw_only=True)
class S3Client:
    """Signs for one bucket; made at first use, since finding credentials may ask the network.

    Attributes:
        bucket: its name.
        endpoint: ``https://host[:port]`` of a store that is not AWS, or "".
        region: or "" for what the environment says (``us-east-1`` at last).
        path_style: the bucket in the path instead of the host name.
        anonymous: no signatures.
        ca_file: certificates to trust instead of the system's, or "".
        logins: access keys for ``host/bucket``, asked for at each signature; None for botocore's own ways.
        or_else: take botocore's own ways also where `logins` has none when the first request is made.
    """

    bucket: str
    endpoint: str = ""
    region: str = ""
    path_style: bool = False
    anonymous: bool = False
    ca_file: str = ""
    logins: Logins | None = None
    or_else: bool = False
    _client: Any = None
    _urls: dict[tuple[str, str], tuple[str, float]] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def where(self) -> str:
        """What logins are asked for: ``host[:port]/bucket``; AWS's host is ``s3.amazonaws.com`` in every region."""
        return f"{urlsplit(self.endpoint).netloc or 's3.amazonaws.com'}/{self.bucket}"

    def url(self, operation: str, key: str, *, fresh: bool = False, **parameters: Any) -> str:
        """A signed URL for ``get_object``, ``head_object``, ``put_object``, ``delete_object`` or ``upload_part``."""
        kept = (operation, key)
        with self._lock:
            url, until = self._urls.get(kept, ("", 0.0))
        if url and not fresh and not parameters and time.monotonic() < until:
            return url
        with self._faults(f"s3://{self.bucket}"):
            url = self._made().generate_presigned_url(
                operation, Params={"Bucket": self.bucket, "Key": key, **parameters}, ExpiresIn=EXPIRES_S
            )
        if not parameters:
            with self._lock:
                if len(self._urls) >= MAX_KEPT:
                    self._urls.clear()
                self._urls[kept] = (url, time.monotonic() + KEEP_S)
        return str(url)

    def start_parts(self, key: str, what: str, deadline: float) -> str:
        """Begin an upload in parts; returns its id."""
        remaining(deadline, what)
        with self._faults(what):
            return str(self._made().create_multipart_upload(Bucket=self.bucket, Key=key)["UploadId"])

    def finish_parts(self, key: str, upload: str, tags: list[str], what: str, deadline: float) -> None:
        """Make the object appear, whole."""
        remaining(deadline, what)
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
        with self._faults(what):
            self._made().complete_multipart_upload(
                Bucket=self.bucket, Key=key, UploadId=upload, MultipartUpload={"Parts": parts}
            )

    def abort_parts(self, key: str, upload: str, what: str) -> None:
        """Give up an upload, so that its parts are not paid for."""
        with self._faults(what):
            self._made().abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=upload)

    def keys(self, prefix: str, what: str, limit: int, deadline: float) -> list[str]:
        """Keys under a prefix, without it; raises StoreError ``too_large`` beyond `limit`."""
        found: list[str] = []
        with self._faults(what):
            pages = self._made().get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self.bucket, Prefix=prefix, PaginationConfig={"PageSize": PAGE_KEYS}):
                remaining(deadline, what)
                found += [str(row["Key"]).removeprefix(prefix) for row in page.get("Contents", ())]
                if len(found) > limit:
                    raise StoreError("too_large", f"{what}: over {limit} names")
        return found

    def close(self) -> None:
        """Close botocore's connections."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _made(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = self._make()
            return self._client

    def _make(self) -> Any:
        try:
            import botocore
            import botocore.config
            import botocore.credentials
            import botocore.session
        except ImportError as error:
            raise StoreError(
                "tool_missing", "stores on S3 need botocore", "pip install 'nomad-dsec[s3]'", "store"
            ) from error
        logging.getLogger("botocore").setLevel(logging.INFO)  # its debug lines hold session tokens and signatures
        session = botocore.session.Session()
        if self.logins is not None:
            provider = _Provider(self.logins, self.where, self.or_else)
            own = session.get_component("credential_provider").providers if self.or_else else []
            resolver = botocore.credentials.CredentialResolver(providers=[provider, *own])
            session.register_component("credential_provider", resolver)
        config = botocore.config.Config(
            signature_version=botocore.UNSIGNED if self.anonymous else "s3v4",
            connect_timeout=10,
            read_timeout=30,
            retries={"total_max_attempts": 1},  # repetition is ours, and bounded by deadlines
            s3={"addressing_style": "path" if self.path_style else "auto"},
            # Checksums in trailers are AWS's own; most other stores refuse them.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        return session.create_client(
            "s3",
            region_name=self.region or session.get_config_variable("region") or "us-east-1",
            endpoint_url=self.endpoint or None,
            verify=self.ca_file or None,
            config=config,
        )

    @contextmanager
    def _faults(self, what: str) -> Iterator[None]:
        """Errors of botocore as ours; only codes are told, since texts may quote requests."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001  (botocore can't be imported where it is not installed)
            raise _translated(error, what) from None


@dataclass(slots=True)
class _Provider:
    """Our logins as one of botocore's ways to credentials."""

    logins: Logins
    where: str
    or_else: bool
    METHOD: str = "dsec"
    CANONICAL_NAME: str = "dsec"

    def load(self) -> Any:
        import botocore.credentials

        logins, where = self.logins, self.where
        if self.or_else and logins(where) is None:
            return None

        class Live(botocore.credentials.Credentials):  # type: ignore[misc]  # botocore has no types
            """Asked at each signature, so that a secret may change."""

            def get_frozen_credentials(self) -> Any:
                login = logins(where)
                if login is None:
                    raise StoreError("denied", f"there is no login for {where}", "give one, or anonymous=true")
                return botocore.credentials.ReadOnlyCredentials(login.user, login.password, login.token or None)

        return Live("", "", method="dsec")


def _translated(error: Exception, what: str) -> StoreError:
    kind = type(error).__name__
    reply = getattr(error, "response", None)
    if isinstance(reply, dict) and "ResponseMetadata" in reply:
        code = str(reply.get("Error", {}).get("Code", ""))[:60]
        found = status_error(int(reply["ResponseMetadata"].get("HTTPStatusCode", 500)), {}, f"{what} ({code})")
        return StoreError("not_found", found.message) if code in ("NoSuchBucket", "NoSuchUpload") else found
    if not type(error).__module__.startswith("botocore."):
        raise error
    if kind in ("NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError", "CredentialRetrievalError"):
        hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give anonymous=true"
        return StoreError("denied", f"{what}: no credentials ({kind})", hint)
    if kind in ("InvalidEndpointDiscoveryConfigurationError", "InvalidRegionError", "ParamValidationError"):
        return StoreError("bad_store", f"{what}: {kind}", "see the store's URL", "store")
    return StoreError("unavailable", f"{what}: {kind}", retryable=True)
