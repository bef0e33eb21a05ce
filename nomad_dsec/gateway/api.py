"""The HTTP API as one table: the router, the OpenAPI document and their tests are made from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from libdsec import wire, wire_fncall

from nomad_dsec.gateway.doors import sandboxfusion
from nomad_dsec.gateway.quotas import Quota

Kind = Literal["local", "verb", "relay", "websocket", "public"]
BYTES = "application/octet-stream"
TAR = "application/x-tar"
JSON_MAX = 4 * 1024 * 1024


class WhoAmI(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The caller's namespace, its bounds and its use."""

    namespace: str
    key_id: str
    admin: bool
    quota: Quota
    sandboxes: int
    cpus: float
    memory_mib: int
    disk_mib: int = 0


class Ready(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Creates can be taken. notes: what is not as it should be all the same."""

    ok: bool = True
    notes: list[str] = []


class KeyRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A new API key for a namespace."""

    namespace: str
    admin: bool = False
    label: str = ""


class KeyInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A key; `key`, the secret itself, only in the reply that made it. Times are seconds since the epoch."""

    id: str
    namespace: str
    admin: bool = False
    label: str = ""
    created_at: float = 0.0
    revoked_at: float | None = None
    key: str = ""


class KeyList(msgspec.Struct, kw_only=True):
    """All keys, revoked ones too."""

    keys: list[KeyInfo]


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One parameter of the query string."""

    name: str
    help: str
    schema: str = "string"
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One operation.

    kind: local (the gateway answers), verb (the node answers with a SandboxInfo that is noted), relay (bytes pass),
    websocket, public (no key needed). request, reply: a wire type, or a media type for raw bytes. messages: what goes
    over a WebSocket.
    """

    method: str
    path: str
    name: str
    summary: str
    kind: Kind
    request: Any = None
    reply: Any = None
    query: tuple[Query, ...] = ()
    admin: bool = False
    max_bytes: int | None = JSON_MAX
    messages: str = ""


_OUTPUT = (
    "From the server: binary messages of 1 byte stream (1 stdout, 2 stderr), 8 bytes big-endian offset, data; JSON "
    "texts of type started, gap (from, to: output that was dropped), exited (an ExecReply without output), error. "
    "From the client: binary messages are stdin; JSON texts of type close_stdin, signal (signal, tree), resize (rows, "
    "cols). Closing detaches; the command goes on."
)
_S = "/v1/sandboxes/{sandbox}"
_PATH = Query(name="path", help="absolute path; bytes that are not UTF-8 percent-encoded", required=True)
_NAMESPACE = Query(name="namespace", help="for admin keys: another namespace, or * for all")
_LIST = (
    _NAMESPACE,
    Query(name="state", help="only these states, comma-separated"),
    Query(name="label", help="k=v; may be repeated, all must match"),
)
_READ = (
    _PATH,
    Query(name="offset", help="first byte", schema="integer"),
    Query(name="length", help="how many bytes", schema="integer"),
)
_WRITE = (
    _PATH,
    Query(name="mode", help="permissions of a new file, octal"),
    Query(name="append", help="1: add to the end", schema="integer"),
    Query(name="parents", help="1: make missing directories", schema="integer"),
    Query(name="user", help="owner of a new file"),
)
_WATCH = (_PATH, Query(name="recursive", help="1: all below", schema="integer"))
_SINCE = (Query(name="since", help="offset of the first output byte wanted", schema="integer"),)
# The door of SandboxFusion, at the root and below a key for clients that can only be given a URL.
_FUSION: tuple[tuple[str, str, str, str, dict[str, Any]], ...] = (
    (
        "POST",
        "/run_code",
        "fusion_run_code",
        "SandboxFusion: run code",
        {
            "request": sandboxfusion.RunCodeRequest,
            "reply": sandboxfusion.RunCodeReply,
            "query": (
                Query(name="image", help="what to run on; default: gateway.fusion_image, or the only image"),
                Query(name="key", help="an API key, where no header can be set"),
            ),
        },
    ),
    ("GET", "/v1/ping", "fusion_ping", 'SandboxFusion: the process answers "pong"', {"reply": str}),
    ("GET", "/health", "fusion_health", "Calls can be taken", {"reply": wire.Ok}),
)


def _r(operation: str, name: str, summary: str, kind: Kind, **more: Any) -> Route:
    method, path = operation.split(" ", 1)
    return Route(method=method, path=path, name=name, summary=summary, kind=kind, **more)


ROUTES: tuple[Route, ...] = (
    _r(
        f"POST {_S}/execs",
        "exec",
        "Run a command to its end",
        "relay",
        request=wire.ExecRequest,
        reply=wire.ExecReply,
        max_bytes=wire.MAX_JSON_BYTES,
    ),
    _r(
        "POST /v1/sandboxes",
        "create",
        "Create one sandbox or a group",
        "local",
        request=wire.CreateRequest,
        reply=wire.CreateReply,
    ),
    _r(
        "DELETE /v1/creates/{key}",
        "create_abandon",
        "Give up a create by its idempotency key; what it made is removed",
        "local",
        reply=wire.Ok,
    ),
    _r("GET /v1/sandboxes", "list", "List the namespace's sandboxes", "local", reply=wire.SandboxList, query=_LIST),
    _r(f"GET {_S}", "info", "One sandbox", "local", reply=wire.SandboxInfo),
    _r(
        f"DELETE {_S}",
        "kill",
        "End it; returns when its resources are gone",
        "verb",
        reply=wire.SandboxInfo,
        query=(Query(name="reason", help="killed"),),
    ),
    _r(f"POST {_S}/pause", "pause", "Freeze it", "verb", reply=wire.SandboxInfo),
    _r(f"POST {_S}/resume", "resume", "Thaw it", "verb", reply=wire.SandboxInfo),
    _r(
        f"PUT {_S}/timeout",
        "set_timeout",
        "Set the TTL from now",
        "verb",
        request=wire.SetTimeoutRequest,
        reply=wire.SandboxInfo,
    ),
    _r(f"PUT {_S}/lease", "renew_lease", "Renew the lease", "verb", request=wire.LeaseRequest, reply=wire.SandboxInfo),
    _r(f"GET {_S}/metrics", "sandbox_metrics", "Its use now", "relay", reply=wire.Metrics),
    _r(f"GET {_S}/network", "network", "Its effective network policy", "relay", reply=wire.NetworkInfo),
    _r(f"GET {_S}/plan", "plan", "The operations that made it", "relay", reply=list[dict[str, Any]]),
    _r(
        f"GET {_S}/execs/stream",
        "exec_spawn",
        "Start a command on a WebSocket",
        "websocket",
        messages="The client's first text is an ExecRequest. " + _OUTPUT,
    ),
    _r(f"GET {_S}/execs", "exec_list", "Execs it remembers", "relay", reply=wire.ExecList),
    _r(f"GET {_S}/execs/{{exec_id}}", "exec_info", "State and kept output of an exec", "relay", reply=wire.ExecReply),
    _r(
        f"POST {_S}/execs/{{exec_id}}/signal",
        "exec_signal",
        "Signal an exec",
        "relay",
        request=wire.SignalRequest,
        reply=wire.Ok,
    ),
    _r(
        f"GET {_S}/execs/{{exec_id}}/stream",
        "exec_attach",
        "Attach to an exec on a WebSocket",
        "websocket",
        messages=_OUTPUT,
        query=_SINCE,
    ),
    _r(f"GET {_S}/files", "file_read", "Read a file", "relay", reply=BYTES, query=_READ),
    _r(
        f"PUT {_S}/files",
        "file_write",
        "Write a file",
        "relay",
        request=BYTES,
        reply=wire.FileWritten,
        query=_WRITE,
        max_bytes=None,
    ),
    _r(f"GET {_S}/files/list", "file_list", "List a directory", "relay", reply=wire.FileList, query=(_PATH,)),
    _r(
        f"GET {_S}/files/stat",
        "file_stat",
        "One directory entry",
        "relay",
        reply=wire.FileStat,
        query=(_PATH, Query(name="follow", help="1: follow links", schema="integer")),
    ),
    _r(f"POST {_S}/files/op", "file_op", "mkdir, move, remove, chmod", "relay", request=wire.FileOp, reply=wire.Ok),
    _r(f"GET {_S}/files/tree", "tree_read", "A directory as a tar stream", "relay", reply=TAR, query=(_PATH,)),
    _r(
        f"PUT {_S}/files/tree",
        "tree_write",
        "Unpack a tar stream",
        "relay",
        request=TAR,
        reply=wire.TreeResult,
        query=(_PATH,),
        max_bytes=None,
    ),
    _r(
        f"GET {_S}/files/watch",
        "file_watch",
        "Changes below a path, on a WebSocket",
        "websocket",
        messages="From the server: one JSON text a WatchEvent.",
        query=(_PATH, Query(name="recursive", help="1: all below", schema="integer")),
    ),
    _r(
        "POST /v1/fncall",
        "fncall",
        "Run a stateless call to its end",
        "local",
        request=wire_fncall.FnRequest,
        reply=wire_fncall.FnResult,
    ),
    _r(
        "POST /v1/fncall/submit",
        "fncall_submit",
        "Judge a submission by its tests",
        "local",
        request=wire_fncall.SubmitRequest,
        reply=wire_fncall.SubmitResult,
    ),
    _r(
        "POST /v1/fncall/cancel",
        "fncall_cancel",
        "End a call that waits or runs",
        "local",
        request=wire_fncall.CancelRequest,
        reply=wire.Ok,
    ),
    _r(
        "GET /v1/fncall/languages",
        "fncall_languages",
        "What an image can run",
        "local",
        reply=wire_fncall.LanguageList,
        query=(Query(name="image", help="name or digest", required=True),),
    ),
    *(
        _r(f"{method} {prefix}{path}", name + suffix, summary, "public", **more)
        for prefix, suffix in (("", ""), ("/fusion/{fusion_key}", "_keyed"))
        for method, path, name, summary, more in _FUSION
    ),
    _r("GET /v1/images", "images", "Images that nodes have", "local", reply=wire.ImageList),
    _r("GET /v1/whoami", "whoami", "The caller's namespace, bounds and use", "local", reply=WhoAmI),
    _r("GET /v1/nodes", "nodes", "Nodes and how they stand", "local", reply=wire.NodeList, admin=True),
    _r(
        "POST /v1/nodes/{node}/drain",
        "drain",
        "Take no new sandboxes there",
        "local",
        request=wire.DrainRequest,
        reply=wire.NodeInfo,
        admin=True,
    ),
    _r("GET /v1/keys", "keys", "API keys without their secrets", "local", reply=KeyList, admin=True),
    _r("POST /v1/keys", "key_create", "A new API key", "local", request=KeyRequest, reply=KeyInfo, admin=True),
    _r("DELETE /v1/keys/{key}", "key_revoke", "End an API key", "local", reply=KeyInfo, admin=True),
    _r("GET /v1/namespaces/{namespace}/quota", "quota", "A namespace's bounds", "local", reply=Quota, admin=True),
    _r(
        "PUT /v1/namespaces/{namespace}/quota",
        "quota_set",
        "Replace a namespace's bounds",
        "local",
        request=Quota,
        reply=Quota,
        admin=True,
    ),
    _r("GET /openapi.json", "openapi", "This document", "public", reply=dict[str, Any]),
    _r("GET /metrics", "metrics", "Prometheus metrics", "public", reply="text/plain"),
    _r("GET /healthz", "healthz", "The process answers", "public", reply=wire.Ok),
    _r("GET /readyz", "readyz", "Creates can be taken", "public", reply=Ready),
)
