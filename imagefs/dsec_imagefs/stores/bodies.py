"""A part of a file as the body of a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO

from dsec_imagefs.stores.base import remaining

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(slots=True, kw_only=True)
class Part:
    """`size` bytes of a file from `offset` on, read as they are sent; urllib3 wants `read`, `tell` and `seek`."""

    file: BinaryIO
    offset: int
    size: int
    deadline: float
    what: str
    sent: Callable[[int], None] | None = None
    _at: int = field(default=0)

    def read(self, amount: int = -1) -> bytes:
        """The next bytes; raises StoreError ``deadline`` when it is over."""
        remaining(self.deadline, self.what)
        left = self.size - self._at
        self.file.seek(self.offset + self._at)
        data = self.file.read(left if amount < 0 else min(amount, left))
        self._at += len(data)
        if self.sent is not None:
            self.sent(self._at)
        return data

    def tell(self) -> int:
        """Bytes read so far."""
        return self._at

    def seek(self, at: int) -> int:
        """Go back, to send again."""
        self._at = at
        return at
