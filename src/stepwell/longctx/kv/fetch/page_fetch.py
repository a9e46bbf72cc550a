"""Pages that are being fetched, or have been."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from stepwell.longctx.kv.cold import ColdPages
from stepwell.longctx.kv.fetch.arrival import Arrival, arrive
from stepwell.longctx.kv.fetch.fetcher import Fetch, Fetcher
from stepwell.longctx.ledger import Ledger


@dataclass(frozen=True, slots=True)
class FetchedPiece:
    """A piece of a fetch. `lanes` and `pages`: [m], by lane and in ascending order of page."""

    lanes: torch.Tensor
    pages: torch.Tensor
    states: Fetch[Arrival]


class PageFetch:
    """Pages of one layer, read in pieces of at most `at_once` pages, of which the next is read while one is used."""

    def __init__(
        self,
        source: ColdPages,
        wanted: torch.Tensor,
        at_once: int,
        *,
        fetcher: Fetcher,
        ledger: Ledger,
        kind: str,
        urgent: bool = True,
        begin: int = 1,
    ) -> None:
        """`wanted`: [L, n] bool. Reading of the first `begin` pieces begins at once; what is `urgent` overtakes what is
        not."""
        self.wanted = wanted
        self._source, self._fetcher, self._ledger, self._kind = source, fetcher, ledger, kind
        where = wanted.nonzero(as_tuple=True)
        self._urgent = urgent
        self.count = len(where[0])
        # Read on the host: a stream that copied them itself would not wait for the model's, which makes them.
        by_piece = [each.split(at_once) for each in (*where, *(each.cpu() for each in where))]
        self._parts = list(zip(*by_piece, strict=True)) if self.count else []
        self._started = [self._start(*part) for part in self._parts[:begin]]

    def pieces(self) -> Iterator[FetchedPiece]:
        """The pieces, once only. Raises IntegrityError for a page that was damaged."""
        for number in range(len(self._parts)):
            due = number + 2 if self._fetcher.beside else number + 1
            for part in self._parts[len(self._started) : due]:
                self._started.append(self._start(*part))
            yield self._started[number]
            self._started[number] = None  # type: ignore[call-overload]  # what was used is not held

    def _start(
        self, lanes: torch.Tensor, pages: torch.Tensor, host_lanes: torch.Tensor, host_pages: torch.Tensor
    ) -> FetchedPiece:
        self._ledger.moved("cold", "hot", self._kind, len(lanes) * self._source.codec.page_bytes)
        read = partial(arrive, self._source, host_lanes, host_pages)
        return FetchedPiece(lanes, pages, self._fetcher.start(read, self._urgent))


def side_by_side(lanes: torch.Tensor, states: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Pages [m, H, P, D] of `count` lanes as [L, H, M * P, D], and which tokens of these are there, [L, M * P] bool
    (None: all)."""
    if count == 1:
        return states.transpose(0, 1).flatten(1, 2)[None], None
    numbers = torch.bincount(lanes, minlength=count)
    most = int(numbers.max())
    if most * count == len(lanes):
        return states.unflatten(0, (count, most)).transpose(1, 2).flatten(2, 3), None
    nth = torch.arange(len(lanes), device=lanes.device) - (numbers.cumsum(0) - numbers)[lanes]
    padded = states.new_zeros(count, most, *states.shape[1:])
    padded[lanes, nth] = states
    there = torch.arange(most, device=lanes.device) < numbers[:, None]
    return padded.transpose(1, 2).flatten(2, 3), there.repeat_interleave(states.shape[2], 1)
