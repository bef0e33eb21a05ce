"""``tar:FILE``: one layer from a plain layer tar, with whiteouts, as `docker save` and OCI layouts have them inside."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsec_imagefs.blob import Blob
from dsec_imagefs.errors import ImageError
from dsec_imagefs.sources.base import LayerSource, Material
from dsec_imagefs.sources.unpack import unpack_layer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import ExitStack

    from dsec_imagefs.sources.base import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTarSource:
    """A tar, compressed by gzip or zstd or not at all."""

    path: str

    @property
    def label(self) -> str:
        """The source string."""
        return f"tar:{self.path}"

    @property
    def cache_key(self) -> str:
        """A file may have changed: nothing to reuse."""
        return ""

    @contextmanager
    def open(self, work: Work) -> Iterator[Material]:
        """Open the file; it is unpacked when the layer is opened."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as err:
            raise ImageError("bad_source", f"can't open {self.path}: {err.strerror}", field="source") from err
        try:
            blob = Blob(fd=fd, size=os.fstat(fd).st_size, name=self.path)

            def unpack(stack: ExitStack) -> Blob:
                return unpack_layer(blob, work, stack)

            yield Material(layers=(LayerSource(open=unpack),))
        finally:
            os.close(fd)
