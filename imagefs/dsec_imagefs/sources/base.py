"""What a source is to the importer: something that opens into a tree, with a configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from dsec_imagefs.image import ImageConfig

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager, ExitStack
    from pathlib import Path

    from dsec_imagefs.blob import Blob
    from dsec_imagefs.tree import Node, Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on what one import may make of its input; a small file can unpack to a very large one."""

    max_unpacked_bytes: int = 256 << 30
    max_files: int = 10_000_000
    max_manifest_bytes: int = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Where a source may write, and whom it tells what. `tmp` is removed after the import, `cache` stays."""

    tmp: Path
    cache: Path
    limits: Limits
    notes: list[str] = field(default_factory=list)
    report: Progress | None = None

    def progress(self, stage: str, done: int, total: int) -> None:
        """Report a step to whoever listens."""
        if self.report is not None:
            self.report(stage, done, total)

    def note(self, text: str) -> None:
        """Keep a sentence for the image's record; beyond a bound only their number would grow."""
        if len(self.notes) < 100:
            self.notes.append(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSource:
    """One layer of a source, not yet read.

    Attributes:
        open: gives an uncompressed tar, or a tree in which every entry is the layer's own; what has to be closed
            goes on the stack, whose end is the end of the content.
        diff_id: digest of the uncompressed tar, ``sha256:...``, by which a layer made before is found; "" for trees.
    """

    open: Callable[[ExitStack], Blob | Node]
    diff_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """A source opened: its layers, lowest first (readable while open), and what the source says about the image."""

    layers: tuple[LayerSource, ...]
    config: ImageConfig = field(default_factory=ImageConfig)
    created: str = ""


class Source(Protocol):
    """One place an image comes from."""

    @property
    def label(self) -> str:
        """The source as recorded and shown, without credentials."""

    @property
    def cache_key(self) -> str:
        """Names a result that may be reused, or "" when it must always be looked at anew."""

    def open(self, work: Work) -> AbstractContextManager[Material]:
        """Fetch and read the source's metadata; file bodies stay readable until the context ends."""
