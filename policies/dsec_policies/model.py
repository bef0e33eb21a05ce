"""The policy that a user asks for: one frozen record and the parser that makes it from plain data. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dsec_policies.clauses import CLAUSES
from dsec_policies.errors import PolicyError
from dsec_policies.profiles import PROFILES

NETWORKS = {
    "none": "a loopback interface and nothing else",
    "open": "the internet; special addresses, the host and other sandboxes stay refused",
}
MAX_PROTECTED_PATHS = 64
NOFILE_RANGE = (64, 65_536)
PATH_MAX = 4096
#: Words that users of other systems try, with what to say instead.
NOT_YET = {
    "allow": "domain allow-lists are not in this version",
    "allowed_domains": "domain allow-lists are not in this version",
    "domains": "domain allow-lists are not in this version",
    "deny": "address lists are not in this version",
    "phases": "policy phases are not in this version",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a sandbox may do.

    ``profile``: a built-in profile (``default`` or ``debug``). ``network``: ``none`` or ``open``.
    ``protected_paths``: absolute paths inside that keep the image's content and can't be replaced.
    ``advisory``: clauses that may go unenforced where the host has no mechanism; all others refuse the create.
    ``no_new_privs``: set-uid programs gain nothing. ``nofile``: open files per process, None for the profile's value.
    """

    profile: str = "default"
    network: str = "none"
    protected_paths: tuple[str, ...] = ()
    advisory: frozenset[str] = frozenset()
    no_new_privs: bool = True
    nofile: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns plain data that ``parse_policy`` reads back to an equal policy."""
        return {
            "profile": self.profile,
            "network": self.network,
            "protected_paths": list(self.protected_paths),
            "advisory": sorted(self.advisory),
            "no_new_privs": self.no_new_privs,
            "nofile": self.nofile,
        }


def parse_policy(mapping: Mapping[str, Any] | str | None) -> Policy:
    """Makes a Policy from decoded JSON or TOML; None is the default policy, a string the name of a profile.

    Raises PolicyError (code ``policy_invalid``) that names the field and how to mend it.
    """
    if mapping is None:
        return Policy()
    if isinstance(mapping, str):
        mapping = {"profile": mapping}
    if not isinstance(mapping, Mapping):
        raise _invalid("policy", f"is {_kind(mapping)}", "give a table of fields or the name of a profile")
    known = [field.name for field in fields(Policy)]
    for key in mapping:
        if key not in known:
            raise _unknown_key(str(key), known)
    return Policy(
        profile=_choice(mapping, "profile", "default", list(PROFILES)),
        network=_network(mapping),
        protected_paths=_protected_paths(mapping.get("protected_paths", ())),
        advisory=_advisory(mapping.get("advisory", ())),
        no_new_privs=_boolean(mapping, "no_new_privs", default=True),
        nofile=_nofile(mapping.get("nofile")),
    )


def _invalid(field: str, message: str, hint: str) -> PolicyError:
    return PolicyError("policy_invalid", message, hint=hint, field=field)


def _kind(value: object) -> str:
    return {bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list", dict: "a table"}.get(
        type(value), "null" if value is None else f"a {type(value).__name__}"
    )


def _unknown_key(key: str, known: list[str]) -> PolicyError:
    if key in NOT_YET:
        return _invalid(key, NOT_YET[key], "choose network = 'none' or 'open' and leave this field out")
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"a policy has the fields {', '.join(known)}"
    return _invalid(key, "a policy has no such field", hint)


def _choice(mapping: Mapping[str, Any], field: str, default: str, choices: list[str]) -> str:
    value = mapping.get(field, default)
    if isinstance(value, str) and value in choices:
        return value
    near = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(choices)}"
    shown = repr(value) if isinstance(value, str) else _kind(value)
    raise _invalid(field, f"{shown} is not known", hint)


def _network(mapping: Mapping[str, Any]) -> str:
    value = mapping.get("network", "none")
    if isinstance(value, (list, Mapping)):
        raise _invalid("network", NOT_YET["allow"], "choose 'none' or 'open'")
    return _choice(mapping, "network", "none", list(NETWORKS))


def _texts(value: object, field: str) -> list[str]:
    if isinstance(value, (str, bytes)) or not isinstance(value, (list, tuple, set, frozenset)):
        raise _invalid(field, f"is {_kind(value)}", "give a list of texts")
    for item in value:
        if not isinstance(item, str):
            raise _invalid(field, f"holds {_kind(item)}", "give a list of texts")
    return list(value)


def _protected_paths(value: object) -> tuple[str, ...]:
    paths = _texts(value, "protected_paths")
    if len(paths) > MAX_PROTECTED_PATHS:
        raise _invalid("protected_paths", f"has {len(paths)} paths", f"give at most {MAX_PROTECTED_PATHS}")
    for path in paths:
        _check_path(path)
    return tuple(dict.fromkeys(paths))


def _check_path(path: str) -> None:
    field = "protected_paths"
    if not path.startswith("/"):
        raise _invalid(field, f"{path!r} is not absolute", f"write it from the root, as {'/' + path!r}")
    parts = path[1:].split("/")
    if path == "/" or any(part in {"", ".", ".."} for part in parts):
        raise _invalid(field, f"{path!r} is not a plain path", "leave out '.', '..', doubled or trailing slashes")
    if "\0" in path or len(path.encode("utf-8", "surrogateescape")) >= PATH_MAX:
        raise _invalid(field, "holds a path that Linux can't open", f"no zero bytes, fewer than {PATH_MAX} bytes")
    if parts[0] in {"proc", "sys", "dev"}:
        raise _invalid(field, f"{path!r} is not part of the image", "the profile seals /proc, /sys and /dev already")


def _advisory(value: object) -> frozenset[str]:
    names = _texts(value, "advisory")
    for name in names:
        if name not in CLAUSES:
            near = difflib.get_close_matches(name, CLAUSES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"clauses are {', '.join(CLAUSES)}"
            raise _invalid("advisory", f"{name!r} is not a clause", hint)
        if not CLAUSES[name].may_be_advisory:
            raise _invalid("advisory", f"{name!r} can't be advisory", "no sandbox starts without it")
    return frozenset(names)


def _boolean(mapping: Mapping[str, Any], field: str, *, default: bool) -> bool:
    value = mapping.get(field, default)
    if not isinstance(value, bool):
        raise _invalid(field, f"is {_kind(value)}", "give true or false")
    return value


def _nofile(value: object) -> int | None:
    if value is None:
        return None
    low, high = NOFILE_RANGE
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _invalid("nofile", f"{value!r} is out of range", f"give a number from {low} to {high}")
    return value
