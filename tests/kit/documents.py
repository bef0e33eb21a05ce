"""What the repository's documents hold: fenced blocks, commands of `dsec`, names of files."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[2]
DSEC = ".venv/bin/dsec"
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"(?<![\w./*<>-])((?:[\w.-]+/)*[\w-]+\.(?:py|c|h|md|txt|toml|proto))(?![\w/*])")
_CALLS = (
    re.compile(r"^\$ \.venv/bin/dsec (.+)$", re.MULTILINE),
    re.compile(r"\$\(\.venv/bin/dsec ([^)\n]+)\)"),
    re.compile(r"`dsec ([a-z][^`]*)`"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of `language` in `document`."""

    document: str
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """What follows the prompts of a console block, without the words after #."""
        lines = (line[2:] for line in self.text.splitlines() if line.startswith("$ "))
        return [re.split(r"\s{2,}#", line)[0].rstrip() for line in lines]


def blocks(document: str) -> list[Block]:
    """All fenced blocks, in their order."""
    text = (REPO / document).read_text("utf-8")
    return [Block(document=document, language=language, text=body) for language, body in _FENCE.findall(text)]


def named_files(document: str) -> set[str]:
    """Names that look like files of this repository; fenced blocks are left out."""
    text = _FENCE.sub("", (REPO / document).read_text("utf-8"))
    return set(_FILE.findall(text))


def dsec_calls(document: str) -> list[list[str]]:
    """The arguments of each `dsec ...` with a verb in the document, in blocks and in sentences."""
    text = re.sub(r"\s{2,}#.*", "", (REPO / document).read_text("utf-8"))
    return [shlex.split(call) for pattern in _CALLS for call in pattern.findall(text)]
