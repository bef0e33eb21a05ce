"""The languages as data: adding one is a few lines. Pure.

In argv templates {source} is the source file, {binary} the compiled one, both names inside the working directory.
`probe` is run once per image; where its program is missing the language is not offered (never a compile_error).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from libdsec.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """One row. compile: () for interpreted ones. artefacts: patterns of what a run needs of a compiler's output.

    warm: run once an image, leaves {binary}, a tar of what belongs below /tmp when the compiler runs (warm.py).
    """

    name: str
    source: str
    run: tuple[str, ...]
    probe: tuple[str, ...]
    compile: tuple[str, ...] = ()
    artefacts: tuple[str, ...] = ()
    warm: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    zygote: bool = False
    memory_overhead_mib: int = 0


# Packages that submissions import, compiled with what they import themselves; those of newer versions may be missing.
_GO_PACKAGES = (
    "bufio bytes container/heap container/list container/ring context crypto/md5 crypto/sha1 crypto/sha256 "
    "encoding/binary encoding/hex encoding/json errors fmt hash/fnv io log math math/big math/bits math/cmplx "
    "math/rand os reflect regexp runtime runtime/debug sort strconv strings sync sync/atomic text/tabwriter time "
    "unicode unicode/utf8 unsafe"
)
_GO_NEWER = "cmp maps slices iter math/rand/v2"
_GO_WARM = (
    f"go build {_GO_PACKAGES} && for name in {_GO_NEWER}; do go build $name 2>/dev/null; done; "
    'exec tar -cf "$0" -C /tmp gocache'
)

TABLE: tuple[Language, ...] = (
    Language(
        name="python",
        source="main.py",
        run=("python3", "-B", "{source}"),
        probe=("python3", "--version"),
        aliases=("python3", "py"),
        env={"PYTHONDONTWRITEBYTECODE": "1", "PYTHONIOENCODING": "utf-8"},
        zygote=True,
    ),
    Language(name="bash", source="main.sh", run=("bash", "{source}"), probe=("bash", "--version"), aliases=("shell",)),
    Language(name="sh", source="main.sh", run=("sh", "{source}"), probe=("sh", "-c", "echo sh")),
    Language(
        name="c",
        source="main.c",
        compile=("gcc", "-O2", "-std=gnu17", "-o", "{binary}", "{source}", "-lm"),
        run=("./{binary}",),
        artefacts=("{binary}",),
        probe=("gcc", "--version"),
    ),
    Language(
        name="cpp",
        source="main.cpp",
        compile=("g++", "-O2", "-std=gnu++17", "-o", "{binary}", "{source}"),
        run=("./{binary}",),
        artefacts=("{binary}",),
        probe=("g++", "--version"),
        aliases=("c++", "cxx"),
    ),
    Language(
        name="rust",
        source="main.rs",
        compile=("rustc", "-O", "-o", "{binary}", "{source}"),
        run=("./{binary}",),
        artefacts=("{binary}",),
        probe=("rustc", "--version"),
        aliases=("rs",),
    ),
    Language(
        name="go",
        source="main.go",
        compile=("go", "build", "-o", "{binary}", "{source}"),
        run=("./{binary}",),
        artefacts=("{binary}",),
        warm=("sh", "-c", _GO_WARM, "{binary}"),
        probe=("go", "version"),
        aliases=("golang",),
        env={
            "GOCACHE": "/tmp/gocache",
            "GOPATH": "/tmp/gopath",
            "CGO_ENABLED": "0",
            "GOFLAGS": "-mod=mod",
            "GOTOOLCHAIN": "local",  # never fetched: there is no network
        },
    ),
    Language(
        name="java",
        source="Main.java",
        compile=("javac", "-encoding", "UTF-8", "{source}"),
        run=("java", "-XX:+UseSerialGC", "-Xss64m", "Main"),
        artefacts=("*.class",),
        probe=("javac", "-version"),
        memory_overhead_mib=256,
    ),
    Language(
        name="javascript",
        source="main.js",
        run=("node", "{source}"),
        probe=("node", "--version"),
        aliases=("js", "nodejs", "node"),
        memory_overhead_mib=64,
    ),
    Language(
        name="typescript",
        source="main.ts",
        compile=("tsc", "--outDir", ".", "--target", "es2022", "--module", "commonjs", "{source}"),
        run=("node", "main.js"),
        artefacts=("*.js",),
        probe=("tsc", "--version"),
        aliases=("ts",),
        memory_overhead_mib=64,
    ),
)

_BY_NAME = {name: row for row in TABLE for name in (row.name, *row.aliases)}
BINARY = "main.bin"
# A compiler's words behind its own warm-up, which is its stdin; times are now, so that no cleverness finds it too old.
UNPACK = ("sh", "-c", 'tar -xmf - -C /tmp && exec "$@" </dev/null', "sh")


def find_language(name: str) -> Language:
    """The row for a name or alias, in any case; UsageError unknown_language lists what there is."""
    row = _BY_NAME.get(name.lower())
    if row is None:
        known = ", ".join(row.name for row in TABLE)
        raise UsageError(
            "unknown_language", f"{name[:40]!r} is no language here", field="language", hint=f"use {known}"
        )
    return row


def render(argv: tuple[str, ...], row: Language) -> tuple[str, ...]:
    """An argv template with the names put in; braces of anything else stay as they are."""
    names = {"{source}": row.source, "{binary}": BINARY}
    pattern = re.compile("|".join(re.escape(key) for key in names))
    return tuple(pattern.sub(lambda match: names[match[0]], word) for word in argv)
