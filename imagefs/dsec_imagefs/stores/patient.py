"""A store whose names and documents are asked for again when that can help. Blocks and pushes have their own."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsec_imagefs.stores.retry import TICKER, Backoff, Ticker, retry
from dsec_imagefs.stores.wrapped import Wrapped


@dataclass(frozen=True, slots=True, kw_only=True)
class PatientStore(Wrapped):
    """Another store; a read of a name, manifest or trace is repeated as `retry` does, up to its deadline."""

    backoff: Backoff = field(default_factory=Backoff)
    ticker: Ticker = TICKER

    def get_ref(self, name: str, *, deadline: float) -> str:
        """See `Store`."""
        return retry(
            lambda until: self.store.get_ref(name, deadline=until),
            deadline=deadline,
            backoff=self.backoff,
            ticker=self.ticker,
        )

    def get_image(self, image: str, *, deadline: float) -> bytes:
        """See `Store`."""
        return retry(
            lambda until: self.store.get_image(image, deadline=until),
            deadline=deadline,
            backoff=self.backoff,
            ticker=self.ticker,
        )

    def get_trace(self, image: str, *, deadline: float) -> bytes:
        """See `Store`."""
        return retry(
            lambda until: self.store.get_trace(image, deadline=until),
            deadline=deadline,
            backoff=self.backoff,
            ticker=self.ticker,
        )

    def refs(self, *, deadline: float) -> tuple[str, ...]:
        """See `Store`."""
        return retry(
            lambda until: self.store.refs(deadline=until), deadline=deadline, backoff=self.backoff, ticker=self.ticker
        )
