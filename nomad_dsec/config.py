"""Settings: one table gives the TOML keys, the environment variables, the flags and the documentation.

Precedence: flag, environment, file, default. Unknown keys are errors that suggest the nearest. `dsec config show`
prints each value with where it came from. Nothing is read at import.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libdsec.errors import UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping

Value = str | int | float | bool | list[str]
SHARED = ("consul", "nomad", "vault", "log")  # sections that several processes read


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row of the table. key: `section.name`; kind: the Python type (list means a list of strings)."""

    key: str
    kind: type
    default: Value
    help: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    secret: bool = False

    @property
    def section(self) -> str:
        """The part before the dot."""
        return self.key.partition(".")[0]

    @property
    def name(self) -> str:
        """The part after the dot: also the attribute and, with hyphens, the flag."""
        return self.key.partition(".")[2]

    @property
    def env(self) -> str:
        """The environment variable."""
        return "DSEC_" + self.key.replace(".", "_").upper()

    @property
    def flag(self) -> str:
        """The command-line flag; a section that several processes read gives it its name."""
        return "--" + (self.key.replace(".", "-") if self.section in SHARED else self.name).replace("_", "-")


def _s(key: str, kind: type, default: Value, help_text: str, **more: Any) -> Setting:
    return Setting(key=key, kind=kind, default=default, help=help_text, **more)


def _server(section: str, program: str, default_port: int) -> tuple[Setting, ...]:
    """How to reach one server of the cluster; off while the address is empty."""
    return (
        _s(f"{section}.address", str, "", f"{program}: http(s)://host[:{default_port}]; empty: without it"),
        _s(f"{section}.token", str, "", "its token, or where that is: file:/path, env:NAME", secret=True),
        _s(f"{section}.ca_file", str, "", "certificates to trust; empty: those of the system"),
        _s(f"{section}.cert_file", str, "", "our own certificate, where it asks for one"),
        _s(f"{section}.key_file", str, "", "the key of our certificate"),
        _s(f"{section}.verify", bool, True, "false: trust any certificate (tests on one machine only)"),
    )


TABLE: tuple[Setting, ...] = (
    _s("node.id", str, "", "node id, part of every sandbox id and kernel name; default: from the host name"),
    _s("node.data", str, "/var/lib/dsec/node", "directory of the journal, sockets and writable layers"),
    _s("node.images", str, "", "image store directory; default: <data>/../images"),
    _s("node.image_store", str, "", "shared store that images not here come from: dir:/PATH, s3://... or oci://..."),
    _s("node.image_authfile", str, "", "credentials of a registry as shared store, containers-auth.json(5)"),
    _s("node.image_cache_gib", int, 64, "disk for data of the shared store in GiB", minimum=1, maximum=1 << 20),
    _s("node.host", str, "127.0.0.1", "address to listen on"),
    _s("node.port", int, 0, "port to listen on; 0 picks a free one", minimum=0, maximum=65535),
    _s("node.advertise", str, "", "host or host:port that Consul tells gateways; default: where it listens"),
    _s("node.token", str, "", "token that the gateway must show; default: made and kept in <data>/token", secret=True),
    _s("node.backends", list, ["container"], "backends to offer"),
    _s("node.launcher", str, "native", "container launcher: native or oci:<runtime>"),
    _s("node.cpus", float, 0.0, "cores to promise; 0: those of the machine", minimum=0, maximum=4096),
    _s("node.memory_mib", int, 0, "memory to promise in MiB; 0: the machine's less a reserve", minimum=0),
    _s("node.cpu_overcommit", float, 16.0, "promised cores per real core", minimum=0.1, maximum=1000),
    _s("node.memory_overcommit", float, 4.0, "promised memory per real memory", minimum=0.1, maximum=100),
    _s(
        "node.capacity",
        str,
        "static",
        "room: static (of the machine) or granted (lent by Nomad allocations)",
        choices=("static", "granted"),
    ),
    _s("node.sandboxes_max", int, 3200, "sandboxes at once", minimum=1, maximum=100_000),
    _s("node.starting_max", int, 0, "starts at once; 0: eight per core", minimum=0, maximum=10_000),
    _s("node.queue_max", int, 4096, "creates waiting for a start", minimum=0, maximum=1_000_000),
    _s("node.uid_base", int, 1_000_000, "first host uid of the sandboxes' ranges of 65,536", minimum=65_536),
    _s("node.uid_ranges", int, 16_384, "how many ranges", minimum=1, maximum=60_000),
    _s("node.upper", str, "auto", "writable layers: auto, tmpfs, btrfs or prjquota"),
    _s("node.pool_slots", int, 32, "cgroup and network slots kept ready", minimum=0, maximum=4096),
    _s("node.network_pool", int, 8, "ready namespaces with `open` network", minimum=0, maximum=4096),
    _s("node.calls_max", int, 0, "stateless calls that run at once; 0: one per core", minimum=0, maximum=4096),
    _s("node.calls_queue_max", int, 4096, "stateless calls that wait for their turn", minimum=0, maximum=1_000_000),
    _s("node.lanes_max", int, 0, "warm lanes of stateless calls in all; 0: eight per core", minimum=0, maximum=16_384),
    _s("node.mount_roots", list, [], "host directories whose subdirectories may be mounted into sandboxes"),
    _s("node.failpoint", str, "", "for crash tests: the step at which the daemon kills itself"),
    _s("gateway.data", str, "/var/lib/dsec/gateway", "directory of the database"),
    _s("gateway.host", str, "127.0.0.1", "address to listen on"),
    _s("gateway.port", int, 8642, "port to listen on; 0 picks a free one", minimum=0, maximum=65535),
    _s("gateway.advertise", str, "", "host or host:port that Consul tells clients; default: where it listens"),
    _s("gateway.nodes", list, [], "node endpoints: unix:/path, or http://host:port#token"),
    _s(
        "gateway.node_token",
        str,
        "",
        "token of the nodes that Consul tells of, or where it is: file:/path, env:NAME, vault:mount/path#key; "
        "{node} in it is the node's id",
        secret=True,
    ),
    _s("gateway.admin_key", str, "", "key of the admin namespace; default: made and kept in the database", secret=True),
    _s("gateway.create_inflight_max", int, 4096, "creates at once; more get `busy`", minimum=1, maximum=1_000_000),
    _s("gateway.fncall_inflight_max", int, 4096, "stateless calls at once, shared between namespaces", minimum=1),
    _s("gateway.fusion_namespace", str, "", "namespace of SandboxFusion calls without a key; empty: a key is needed"),
    _s("gateway.fusion_image", str, "", "image of SandboxFusion calls that name none; empty: the only one there is"),
    _s(
        "gateway.sandbox_secrets",
        str,
        "",
        "where secrets that creates name are: file:/directory or vault:mount/path, a directory a namespace below it; "
        "empty: creates bring values only",
    ),
    _s("gateway.failpoint", str, "", "for crash tests: the step at which the gateway kills itself"),
    *_server("consul", "a Consul agent", 8500),
    _s("consul.ttl_s", float, 15.0, "a check that is not renewed for so long is critical", minimum=1, maximum=600),
    _s("consul.probe_s", float, 30.0, "each sandbox's PID 1 is asked so often; 0: never", minimum=0, maximum=3600),
    _s("consul.sandbox_services_max", int, 64, "sandboxes that may be services of their own", minimum=0, maximum=1000),
    *_server("nomad", "a Nomad agent", 4646),
    *_server("vault", "a Vault server", 8200),
    _s("vault.namespace", str, "", "Vault's namespace (its enterprise version)"),
    _s("vault.role_id", str, "", "log in by AppRole: the role's id"),
    _s("vault.secret_id", str, "", "log in by AppRole: its secret, or file:/path, env:NAME", secret=True),
    _s("vault.role", str, "", "log in by a JWT, such as Nomad's workload identity: the role"),
    _s("vault.jwt_file", str, "", "log in by a JWT: the file that holds it"),
    _s("vault.jwt_mount", str, "jwt-nomad", "log in by a JWT: where the method is mounted"),
    _s(
        "registry.logins",
        list,
        [],
        "logins of image registries: HOST[/PATH]=file:/path, env:NAME or vault:mount/path#key of a user:password",
    ),
    _s("log.level", str, "info", "debug, info, warning or error", choices=("debug", "info", "warning", "error")),
    _s("log.json", bool, True, "JSON lines; false: text for people"),
)
BY_KEY = {row.key: row for row in TABLE}


@dataclass(frozen=True, slots=True)
class Settings:
    """Resolved values: `settings["node.port"]`, and where each came from."""

    values: Mapping[str, Value]
    origins: Mapping[str, str]

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def section(self, name: str) -> dict[str, Any]:
        """The values of one section by bare name."""
        return {BY_KEY[key].name: value for key, value in self.values.items() if BY_KEY[key].section == name}


def add_flags(parser: argparse.ArgumentParser, sections: Iterable[str]) -> None:
    """Give the parser a flag for each setting of these sections, and --config FILE."""
    parser.add_argument("--config", metavar="FILE", default=None, help="TOML file of settings")
    for row in TABLE:
        if row.section in sections:
            parser.add_argument(row.flag, dest=row.key, default=None, metavar=row.kind.__name__.upper(), help=row.help)


def load(
    *, file: Path | None = None, env: Mapping[str, str] | None = None, flags: Mapping[str, Any] | None = None
) -> Settings:
    """Merge defaults, file, environment and flags; UsageError bad_config names the setting and its origin."""
    values: dict[str, Value] = {row.key: row.default for row in TABLE}
    origins: dict[str, str] = dict.fromkeys(values, "default")
    environment = os.environ if env is None else env
    layers: list[tuple[str, dict[str, Any]]] = []
    if file is not None:
        layers.append((str(file), _read_toml(file)))
    layers.append(("environment", {row.key: environment[row.env] for row in TABLE if row.env in environment}))
    given = {key: value for key, value in (flags or {}).items() if key in BY_KEY and value is not None}
    layers.append(("flag", given))
    for origin, layer in layers:
        for key, raw in layer.items():
            values[key] = _coerce(BY_KEY[key], raw, origin)
            origins[key] = origin if origin != "environment" else BY_KEY[key].env
    return Settings(values, origins)


def from_args(args: argparse.Namespace) -> Settings:
    """Settings of a process whose parser had add_flags."""
    flags = vars(args)
    file = Path(flags["config"]) if flags.get("config") else None
    return load(file=file, flags=flags)


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        tree = tomllib.loads(file.read_text("utf-8"))
    except FileNotFoundError as error:
        raise UsageError("bad_config", f"there is no file {file}", field="config", hint="check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError("bad_config", f"{file} is not TOML: {error}", field="config") from error
    flat: dict[str, Any] = {}
    for section, body in tree.items():
        if not isinstance(body, dict):
            raise unknown_key(section, file)
        for name, value in body.items():
            key = f"{section}.{name}"
            if key not in BY_KEY:
                raise unknown_key(key, file)
            flat[key] = value
    return flat


def unknown_key(key: str, file: Path) -> UsageError:
    """The error for a key that is not in the table."""
    near = difflib.get_close_matches(key, BY_KEY, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "see `dsec config show` for all keys"
    return UsageError("bad_config", f"{file}: unknown setting {key}", field=key, hint=hint)


def _coerce(row: Setting, raw: Any, origin: str) -> Value:
    try:
        value = _parse(row.kind, raw)
    except (TypeError, ValueError) as error:
        raise _bad(row, origin, f"{raw!r} is not {_article(row.kind)}") from error
    if row.choices and value not in row.choices:
        raise _bad(row, origin, f"{value!r} is none of {', '.join(row.choices)}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        if row.minimum is not None and value < row.minimum:
            raise _bad(row, origin, f"{value} is below {row.minimum:g}")
        if row.maximum is not None and value > row.maximum:
            raise _bad(row, origin, f"{value} is above {row.maximum:g}")
    return value


def _bad(row: Setting, origin: str, why: str) -> UsageError:
    where = {"flag": row.flag, "environment": row.env}.get(origin, f"{row.key} in {origin}")
    return UsageError("bad_config", f"{where}: {why}", field=row.key, hint=row.help)


def _article(kind: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", list: "a list of strings"}.get(
        kind, "a string"
    )


def _parse(kind: type, raw: Any) -> Value:
    if kind is bool:
        words: dict[Any, bool] = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}
        if isinstance(raw, bool | str) and raw in words:
            return words[raw]
        raise ValueError(raw)
    if isinstance(raw, bool):
        raise TypeError(raw)
    if kind is list:
        parts = raw.split(",") if isinstance(raw, str) else raw
        if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
            raise TypeError(raw)
        return [part.strip() for part in parts if part.strip()]
    if kind is str and not isinstance(raw, str):
        raise TypeError(raw)
    if kind is int and isinstance(raw, float):
        raise TypeError(raw)
    parsed: Value = kind(raw)
    if isinstance(parsed, float) and parsed != parsed:  # NaN compares with nothing
        raise ValueError(raw)
    return parsed
