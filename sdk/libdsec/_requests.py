"""Requests from arguments, checked before anything is sent, so that an error names the argument."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

import msgspec

from libdsec.errors import UsageError
from libdsec.network import not_supported
from libdsec.secret import SecretRef
from libdsec.wire import CreateRequest, ExecRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from libdsec.wire import BackendName, Qos

T = TypeVar("T")
SNAPSHOTS_MISSING = "no backend of this version makes snapshots"


class CreateOptions(TypedDict, total=False):
    """What a sandbox is to be; all optional.

    backend: "container". cpus: cores, 1.0. memory_mib: 512. disk_mib: 1024, what it may write. pids: 512. timeout_s:
    it ends so long after it was ready, 3600. lease_s: it ends so long after this process stopped renewing (which is
    done in the background). env, cwd, user, hostname: for its commands. qos: "latency_sensitive" or "best_effort".
    policy: a profile's name or a mapping. labels: to find it by. secrets: file name -> text, or a SecretRef that the
    gateway looks up; shown below /run/secrets, for `user` and root inside to read. idempotency_key: the same key gives
    the same sandbox. wait_s: how long to queue for room, 60.
    """

    backend: BackendName
    cpus: float
    memory_mib: int
    disk_mib: int
    pids: int
    timeout_s: float
    lease_s: float | None
    env: Mapping[str, str]
    cwd: str
    user: str
    hostname: str
    qos: Qos
    policy: str | Mapping[str, Any]
    labels: Mapping[str, str]
    secrets: Mapping[str, str | SecretRef]
    idempotency_key: str
    wait_s: float


def create_request(
    image: str, *, snapshot: str | None, count: int, all_or_none: bool, options: CreateOptions
) -> CreateRequest:
    """The wire form of a create."""
    if snapshot is not None:
        raise not_supported("create(snapshot=)", options.get("backend", "container"), SNAPSHOTS_MISSING)
    if not image:
        raise UsageError("no_image", "no image is named", field="image", hint="`dsec image ls` shows what there is")
    fields = {key: _plain(value) for key, value in options.items() if value is not None}
    if "secrets" in fields:
        fields |= _split_secrets(fields["secrets"])
    fields.setdefault("idempotency_key", "")
    fields["idempotency_key"] = fields["idempotency_key"] or new_id("create")
    return checked(CreateRequest, image=image, count=count, all_or_none=all_or_none, **fields)


def _split_secrets(given: Any) -> dict[str, Any]:
    """Values and references, as the wire has them apart. What is neither is the wire's to refuse, and is not quoted."""
    if not isinstance(given, dict):
        return {}
    refs = {name: value.name for name, value in given.items() if isinstance(value, SecretRef)}
    values = {name: value for name, value in given.items() if name not in refs}
    return {"secrets": values, "secret_refs": refs}


def exec_request(cmd: Sequence[str] | str, **fields: Any) -> ExecRequest:
    """The wire form of a command."""
    argv: list[str] | str = cmd if isinstance(cmd, str) else list(cmd)
    if not argv or not argv[0]:
        raise UsageError("no_command", "no command is given", field="cmd", hint='give ["program", "arg"] or a text')
    texts = [argv] if isinstance(argv, str) else argv
    if any("\0" in text for text in texts if isinstance(text, str)):
        raise UsageError("bad_command", "an argument can't hold a NUL", field="cmd", hint="use stdin or files for data")
    plain = {key: _plain(value) for key, value in fields.items() if value is not None}
    return checked(ExecRequest, cmd=argv, **plain)


def checked(kind: type[T], **fields: Any) -> T:
    """A wire struct whose bounds were checked (msgspec checks them only when it converts)."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `")
        field, hint = where.rstrip("`").removeprefix("$").removeprefix("."), ""
        if "unknown field `" in message:
            field = message.split("unknown field `", 1)[1].rstrip("`")
            hint = f"arguments are: {', '.join(kind.__annotations__)}"
        field = {"count": "n"}.get(field, field)
        raise UsageError("bad_argument", message, field=field, hint=hint) from error


def new_id(prefix: str) -> str:
    """A fresh id: 80 random bits."""
    return f"{prefix}-{secrets.token_hex(10)}"


def _plain(value: Any) -> Any:
    """Mappings and sequences of any class as dicts and lists; whole numbers stay as they are."""
    if hasattr(value, "keys") and not isinstance(value, dict):
        return dict(cast("Mapping[str, Any]", value))
    return value
