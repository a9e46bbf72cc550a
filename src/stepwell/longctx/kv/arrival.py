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


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for each device: all that comes there shares one link."""
    return torch.cuda.Stream(device)
