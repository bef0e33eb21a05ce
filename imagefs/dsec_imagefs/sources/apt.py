"""Which Debian archives this host uses, read from apt's own source files, so that no mirror is named in our code."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

_ONE_LINE = re.compile(r"^deb\s+(?:\[[^\]]*\]\s+)?(\S+)\s+(\S+)\s+(.+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """One archive: its base address, one suite, and the components taken from it."""

    uri: str
    suite: str
    components: tuple[str, ...]

    def line(self) -> str:
        """The line for a sources.list, without any credentials."""
        return f"deb {without_credentials(self.uri)} {self.suite} {' '.join(self.components)}\n"


def without_credentials(uri: str) -> str:
    """Drop ``user:password@`` from an address."""
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def parse_one_line(text: str) -> list[Archive]:
    """Archives of a ``*.list`` file, sources.list(5)."""
    found = []
    for line in text.splitlines():
        match = _ONE_LINE.match(line.partition("#")[0].strip())
        if match:
            found.append(Archive(uri=match[1], suite=match[2], components=tuple(match[3].split())))
    return found


def parse_deb822(text: str) -> list[Archive]:
    """Archives of a ``*.sources`` file, sources.list(5)."""
    found: list[Archive] = []
    for stanza in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        key = ""
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            if line[:1].isspace():
                fields[key] = f"{fields.get(key, '')} {line.strip()}"
            else:
                key, _, value = line.partition(":")
                key = key.strip().lower()
                fields[key] = value.strip()
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() in ("no", "false"):
            continue
        components = tuple(fields.get("components", "").split())
        found.extend(
            Archive(uri=uri, suite=suite, components=components)
            for uri in fields.get("uris", "").split()
            for suite in fields.get("suites", "").split()
        )
    return found


def read_archives(etc: Path = Path("/etc/apt")) -> list[Archive]:
    """All archives that apt on this host reads; none when the host has no apt."""
    found = parse_one_line(_text(etc / "sources.list"))
    parts = etc / "sources.list.d"
    for path in sorted(parts.iterdir()) if parts.is_dir() else ():
        if path.suffix == ".list":
            found += parse_one_line(_text(path))
        elif path.suffix == ".sources":
            found += parse_deb822(_text(path))
    return found


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


def choose_archives(suite: str, archives: list[Archive]) -> list[Archive]:
    """The base archive for a suite first, then its updates and security archives; empty when the host has none.

    A host of another release lends its base archive's address, as one mirror carries all releases.
    """
    main = [a for a in archives if "main" in a.components]
    base = [a for a in main if a.suite == suite]
    if not base:
        lent = [a for a in main if a.uri.rstrip("/").endswith(("/debian", "/ubuntu")) and "-" not in a.suite]
        base = [Archive(uri=a.uri, suite=suite, components=("main",)) for a in lent]
    extra = [a for a in main if a.suite in (f"{suite}-updates", f"{suite}-security")]
    return [Archive(uri=a.uri, suite=a.suite, components=("main",)) for a in (*base[:1], *(extra if base else ()))]
