"""Fetched pages on the model's device; on CUDA they come on a stream of their own, beside the model's kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from stepwell.longctx.kv.cold import ColdPages

States = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Arrival:
    """K and V of some pages, [m, H, P, D] each, of which copying and decoding have been asked for."""

    _states: States
    _done: torch.cuda.Event | None = None

    def states(self) -> States:
        """For use by the current stream: it waits for them (the host does not), and their memory is not used anew
        before it is through with what it was asked for until they are dropped."""
        if self._done is not None:
            stream = torch.cuda.current_stream(self._states[0].device)
            stream.wait_event(self._done)
            for each in self._states:
                each.record_stream(stream)
        return self._states


def arrive(source: ColdPages, lanes: torch.Tensor, pages: torch.Tensor) -> Arrival:
    """Pages `pages[i]` of lanes `lanes[i]`: read here, copied and decoded on the stream. That does not wait for the
    model's: what is read lies in host memory or on disk, complete. Raises what `ColdPages.read` raises."""
    if source.device.type != "cuda":
        return Arrival(source.read(lanes, pages))
    with torch.cuda.stream(_stream(source.device)):
        states, done = source.read(lanes, pages), torch.cuda.Event()
        done.record()
    return Arrival(states, done)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for each device: all that comes there shares one link."""
    return torch.cuda.Stream(device)
