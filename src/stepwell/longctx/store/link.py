"""Modelled links: the effect of a slower connection between tiers, in real time or computed.

A link carries `bandwidth` bytes a second and adds `latency` seconds to each transfer. Transfers queue one behind the
other; the latency of one passes while the next is carried. `virtual` computes when each would be done; `Throttled`
delays a store that is faster than that. Both use the same bookkeeping, so that a run with real threads and sleeps can
be compared with the computation. Every measurement through either is modelled, and must be called so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepwell.io.clock import Clock, MonotonicClock

if TYPE_CHECKING:
    import torch

    from stepwell.longctx.store.base import PageStore


@dataclass(frozen=True, slots=True)
class ModelledLink:
    """A modelled link: bytes a second, and seconds."""

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 and self.latency >= 0):
            raise ValueError(f"a link of {self.bandwidth} bytes/s with a latency of {self.latency} s")

    def __str__(self) -> str:
        return f"modelled link, {self.bandwidth / 1e9:g} GB/s, {self.latency * 1e6:g} us"


class LinkQueue:
    """The transfers of one modelled link, one behind the other. Any thread may use it."""

    def __init__(self, link: ModelledLink) -> None:
        self.link = link
        self._lock = threading.Lock()
        self._idle_from = float("-inf")

    def finish(self, arrival: float, nbytes: int) -> float:
        """Time at which a transfer is done that is requested at `arrival`, behind all that were requested before this
        call."""
        with self._lock:
            self._idle_from = max(arrival, self._idle_from) + nbytes / self.link.bandwidth
            return self._idle_from + self.link.latency


def virtual(link: ModelledLink, requests: Iterable[tuple[float, int]]) -> list[float]:
    """Time at which each request (arrival in seconds, bytes), in order of arrival, would be done on this modelled
    link."""
    queue = LinkQueue(link)
    return [queue.finish(arrival, nbytes) for arrival, nbytes in requests]


class Throttled:
    """`store` behind a modelled link: a `get` takes at least the link's time for its bytes, in the caller's thread, and
    longer if the store itself does. Give several stores one `queue` to let them share a link. All else passes at once.
    """

    def __init__(
        self,
        store: PageStore,
        link: ModelledLink | LinkQueue,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.store = store
        self.page_bytes = store.page_bytes
        self.queue = link if isinstance(link, LinkQueue) else LinkQueue(link)
        self._clock = clock or MonotonicClock()
        self._sleep = sleep

    @property
    def room(self) -> int:
        """Room of the store behind it."""
        room: int = self.store.room  # type: ignore[attr-defined]
        return room

    def put(self, payload: torch.Tensor) -> torch.Tensor:
        return self.store.put(payload)

    def get(self, places: torch.Tensor) -> torch.Tensor:
        done = self.queue.finish(self._clock.now(), len(places) * self.page_bytes)
        pages = self.store.get(places)
        while (left := done - self._clock.now()) > 0:
            self._sleep(left)
        return pages

    def retain(self, places: torch.Tensor) -> None:
        self.store.retain(places)

    def free(self, places: torch.Tensor) -> None:
        self.store.free(places)

    def bytes_by_tier(self) -> dict[str, int]:
        return self.store.bytes_by_tier()

    def close(self) -> None:
        self.store.close()
