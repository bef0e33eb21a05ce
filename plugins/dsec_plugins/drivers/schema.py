"""One dataclass gives a driver's HCL schema, its decoder and its documentation.

Fields are made by `setting(...)`, of the types that Nomad's encoder can send: str, bool, int, float, list of str, map
of str, and a list of nested dataclasses (repeated blocks).
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

import msgpack

from dsec_plugins.proto import hclspec_pb2 as hcl

T = TypeVar("T")

_HCL_TYPES: dict[Any, str] = {
    str: "string",
    bool: "bool",
    int: "number",
    float: "number",
    list[str]: "list(string)",
    dict[str, str]: "map(string)",
}


class ConfigError(ValueError):
    """A configuration that can't be used; the text names the field and the fix."""


def setting(help_text: str, default: Any = dataclasses.MISSING, *, required: bool = False) -> Any:
    """A dataclass field with its documentation. Mutable defaults are copied."""
    metadata = {"help": help_text, "required": required}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    if default is dataclasses.MISSING and not required:
        raise TypeError("a setting without default must be required")
    return dataclasses.field(default=default, metadata=metadata)


def spec_of(kind: type) -> Any:
    """The hclspec of a dataclass: an object with one attribute (or block list) a field."""
    attributes = {}
    for row in dataclasses.fields(kind):
        wanted = _types(kind)[row.name]
        nested = _nested(wanted)
        if nested is not None:
            block = hcl.BlockList(name=row.name, nested=spec_of(nested))
            attributes[row.name] = hcl.Spec(block_list=block)
            continue
        attr = hcl.Attr(name=row.name, type=_HCL_TYPES[_plain(wanted)], required=row.metadata.get("required", False))
        attributes[row.name] = hcl.Spec(Attr=attr)
    return hcl.Spec(object=hcl.Object(attributes=attributes))


def decode(kind: type[T], data: bytes) -> T:
    """The dataclass for what Nomad sent (msgpack; empty means all defaults); ConfigError names the field."""
    raw = msgpack.unpackb(data, raw=False, strict_map_key=False) if data else {}
    return _build(kind, raw, "config")


def document(kind: type) -> list[tuple[str, str, str, str]]:
    """Rows for a manual: name, HCL type, default, help."""
    rows = []
    for row in dataclasses.fields(kind):
        wanted = _types(kind)[row.name]
        name = "blocks" if _nested(wanted) else _HCL_TYPES[_plain(wanted)]
        default = "required" if row.metadata.get("required") else _shown(row)
        rows.append((row.name, name, default, row.metadata["help"]))
    return rows


def _shown(row: dataclasses.Field[Any]) -> str:
    value = row.default_factory() if row.default_factory is not dataclasses.MISSING else row.default
    return "" if value in (None, "", [], {}) else str(value)


def _types(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _plain(wanted: Any) -> Any:
    """`X` of `X | None`."""
    if isinstance(wanted, types.UnionType):
        return next(part for part in wanted.__args__ if part is not type(None))
    return wanted


def _nested(wanted: Any) -> type | None:
    args = typing.get_args(wanted)
    if typing.get_origin(wanted) is list and isinstance(args[0], type) and dataclasses.is_dataclass(args[0]):
        return args[0]
    return None


def _build(kind: type[T], raw: Any, where: str) -> T:
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: a block was expected")
    values = {}
    hints = _types(kind)
    for row in dataclasses.fields(kind):  # type: ignore[arg-type]
        given = raw.get(row.name)
        if given is None:
            if row.metadata.get("required"):
                raise ConfigError(f"{where}.{row.name} is missing: {row.metadata['help']}")
            continue
        values[row.name] = _convert(hints[row.name], given, f"{where}.{row.name}")
    unknown = sorted(set(raw) - {row.name for row in dataclasses.fields(kind)})  # type: ignore[arg-type]
    if unknown:
        raise ConfigError(f"{where}.{unknown[0]}: there is no such setting")
    return kind(**values)


def _convert(wanted: Any, given: Any, where: str) -> Any:
    nested = _nested(wanted)
    if nested is not None:
        return [_build(nested, item, f"{where}[{place}]") for place, item in enumerate(_expect(given, list, where))]
    plain = _plain(wanted)
    if plain is bool or plain is str:
        return _expect(given, plain, where)
    if plain in (int, float):
        return _number(plain, given, where)
    if plain == list[str]:
        return [_expect(item, str, where) for item in _expect(given, list, where)]
    pairs = _expect(given, dict, where)
    return {_expect(key, str, where): _expect(value, str, where) for key, value in pairs.items()}


def _expect(given: Any, kind: type[T], where: str) -> T:
    if not isinstance(given, kind):
        raise ConfigError(f"{where}: {given!r} is not a {kind.__name__}")
    return given


def _number(kind: type, given: Any, where: str) -> Any:
    """Nomad sends what no double holds exactly as decimal text: 0.1 arrives as "0.1"."""
    if kind is int and (type(given) is int or (isinstance(given, str) and given.removeprefix("-").isdecimal())):
        return int(given)  # not by way of a double, which holds 53 bits
    try:
        value = float(given) if not isinstance(given, bool) else None
    except (TypeError, ValueError):
        value = None
    if value is None or value != value:
        raise ConfigError(f"{where}: {given!r} is not a number")
    if kind is int and not value.is_integer():
        raise ConfigError(f"{where}: {given!r} is not a whole number")
    return int(value) if kind is int else value
