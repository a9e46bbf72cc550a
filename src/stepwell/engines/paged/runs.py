"""Which bytes a copy moves: from shards to pieces of equal size, and those to evenly spaced runs.

A copy engine moves a run of evenly spaced pieces in one call (a 2-D copy), so fewer and longer runs cost less; a kernel
takes the pieces one by one. Everything here is arithmetic on addresses: it is where bounds are checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stepwell.engines.paged.base import Shard
from stepwell.engines.paged.pool import LayerStack, Pool, Span, stacks
from stepwell.io.memory import Bytes

Numbers = npt.NDArray[np.int64]

LONGEST_PITCH = (1 << 31) - 1
"""Longest pitch of a 2-D copy, in bytes: the runtime refuses longer ones (cudaDeviceProp.memPitch)."""


class Run(NamedTuple):
    """`height` pieces of `width` bytes: from `host` on every `host_pitch` bytes, from `device` on every
    `device_pitch`."""

    host: int
    host_pitch: int
    device: int
    device_pitch: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Places:
    """Pages to copy, in order: `host[i]` is the address of the place for page `pages[i]`, and `memory[i]` where the
    memory begins that it is in: each is known to a driver by itself."""

    host: Numbers
    pages: Numbers
    memory: Numbers

    @classmethod
    def side_by_side(cls, memory: Bytes, pages: Sequence[int], page_bytes: int) -> Places:
        """Pages one after the other in memory of their own."""
        numbers, first = np.asarray(pages, np.int64), memory.ctypes.data
        host = first + page_bytes * np.arange(len(numbers), dtype=np.int64)
        return cls(host, numbers, np.full(len(numbers), first, np.int64))

    def __len__(self) -> int:
        return len(self.pages)


def check(shard: Shard, num_pages: int, page_bytes: int) -> None:
    """Raises IndexError for a shard that is not wholly inside its slot and the pool."""
    (slots, slot), skip, pages = shard
    fits = 0 <= slot < len(slots) and skip >= 0 and (skip + len(pages)) * page_bytes <= slots.shape[1]
    if not fits or not all(0 <= page < num_pages for page in pages):
        raise IndexError(f"pages {list(pages)} of {num_pages} do not fit slot {slot} from its page {skip} on")


def check_whole(shard: Shard, page_bytes: int) -> None:
    """Raises IndexError for a shard that does not fill its slot."""
    (slots, slot), skip, pages = shard
    if skip or len(pages) * page_bytes != slots.shape[1]:
        raise IndexError(f"{len(pages)} pages do not fill slot {slot} of {slots.shape[1]} bytes")


def places(shards: Sequence[Shard], page_bytes: int) -> Places:
    """The places of shards that were checked."""
    host, pages, memory = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for (slots, slot), skip, wanted in shards:
        first = slots.ctypes.data + slot * slots.strides[0] + skip * page_bytes
        host.append(first + page_bytes * np.arange(len(wanted), dtype=np.int64))
        pages.append(np.asarray(wanted, np.int64))
        memory.append(np.full(len(wanted), slots.ctypes.data, np.int64))
    return Places(np.concatenate(host), np.concatenate(pages), np.concatenate(memory))


def runs(where: Places, pool: Pool) -> Iterator[Run]:
    """All bytes of these places, each once, in few runs: of as many pages as are evenly spaced, layer by layer, or of a
    page's layers, page by page, whichever are fewer."""
    spans = pool.spans
    stretches = list(_even(where, max(span.stride for span in spans)))
    at = 0
    for stack in stacks(spans):
        for first, count in stretches:
            if count >= stack.count or stack.step > LONGEST_PITCH:
                for span in spans[at : at + stack.count]:
                    yield _of_pages(where, first, count, span)
            else:
                for number in range(first, first + count):
                    yield _of_layers(where, number, stack)
        at += stack.count


def _of_pages(where: Places, first: int, count: int, span: Span) -> Run:
    host, page = int(where.host[first]), int(where.pages[first])
    host_pitch = device_pitch = span.nbytes
    if count > 1:
        host_pitch = int(where.host[first + 1]) - host
        device_pitch = (int(where.pages[first + 1]) - page) * span.stride
    device = span.address + page * span.stride
    return Run(host + span.offset, host_pitch, device, device_pitch, span.nbytes, count)


def _of_layers(where: Places, number: int, stack: LayerStack) -> Run:
    span = stack.first
    device = span.address + int(where.pages[number]) * span.stride
    return Run(int(where.host[number]) + span.offset, span.nbytes, device, stack.step, span.nbytes, stack.count)


def _even(where: Places, stride: int) -> Iterator[tuple[int, int]]:
    """(first, count) of stretches in which both host and device places are evenly spaced, and ascend. Each is of one
    memory: the runtime refuses to copy a range that was registered in parts."""
    if not len(where):
        return
    host_steps, page_steps = np.diff(where.host), np.diff(where.pages)
    usable = (np.diff(where.memory) == 0) & (host_steps > 0) & (page_steps > 0)
    usable &= (host_steps <= LONGEST_PITCH) & (page_steps <= LONGEST_PITCH // stride)
    first = 0
    for i in range(1, len(where)):
        if not usable[i - 1] or (
            i - first > 1 and (host_steps[i - 1] != host_steps[first] or page_steps[i - 1] != page_steps[first])
        ):
            yield first, i - first
            first = i
    yield first, len(where) - first


def pieces(where: Places, pool: Pool) -> Numbers:
    """Rows of host addresses, device addresses and sizes: a piece for each page and span."""
    spans = pool.spans
    host = [where.host + span.offset for span in spans]
    device = [span.address + where.pages * span.stride for span in spans]
    sizes = [np.full(len(where), span.nbytes, np.int64) for span in spans]
    return np.stack([np.concatenate(host), np.concatenate(device), np.concatenate(sizes)])
