"""Fetched pages on the model's device; on CUDA they come on a stream of their own, beside the model's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

from stepwell.longctx.kv.cold import ColdPages

States = tuple[torch.Tensor, torch.Tensor]
_waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """K and V of some pages, [m, H, P, D] each, of which copying and decoding have been asked for."""

    _states: States
    _done: torch.cuda.Event | None = None

    def states(self) -> States:
        """The states, for use by the current stream: it waits for them (the host does not), and their memory is not
        reused before the stream has done its work on them."""
        if self._done is not None:
            stream = torch.cuda.current_stream(self._states[0].device)
            with _timed(stream):
                stream.wait_event(self._done)
            for each in self._states:
                each.record_stream(stream)
        return self._states


def arrive(source: ColdPages, lanes: torch.Tensor, pages: torch.Tensor, device: torch.device | None = None) -> Arrival:
    """Pages `pages[i]` of lanes `lanes[i]`, which lie on the host: read here, copied to `device` (None: the model's)
    and decoded on the stream. That does not wait for the model's: what is read lies in host memory or on disk,
    complete. Raises what `ColdPages.read` raises."""
    at = device if device is not None else source.device
    if at.type != "cuda":
        return Arrival(source.read(lanes, pages, at))
    with torch.cuda.stream(_stream(at)):
        states, done = source.read(lanes, pages, at), torch.cuda.Event()
        done.record()
    return Arrival(states, done)


@contextmanager
def timing() -> Iterator[Callable[[], float]]:
    """Inside, it is timed how long streams wait for pages: for benchmarks, as two more events a piece are not free.
    Gives what tells the seconds so far; call it when the device has nothing left to do. 0 without CUDA."""
    global _waits
    mine: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    before, _waits = _waits, mine
    try:
        yield lambda: sum(began.elapsed_time(ended) for began, ended in mine) / 1e3
    finally:
        _waits = before


@contextmanager
def _timed(stream: torch.cuda.Stream) -> Iterator[None]:
    if _waits is None:
        yield
        return
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record(stream)
    yield
    ended.record(stream)
    _waits.append((began, ended))


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device, one for each: all transfers to it share one link."""
    return torch.cuda.Stream(device)
