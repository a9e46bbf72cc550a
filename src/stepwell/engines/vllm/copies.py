"""Copying between the engine's pages and slots, on CPU. The one class that a CUDA twin will replace.

A shard lies in its slot page by page, and within a page layer by layer:

    slot:  | page 0: layer 0 | layer 1 | ... | page 1: layer 0 | ... |

Pages are opaque bytes: on CPU their content is packed for the instruction set, which is part of the namespace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from stepwell.client.worker import Slot
from stepwell.engines.vllm.team import Bytes, Copy, Index, Team
from stepwell.errors import Unsupported


class Shard(NamedTuple):
    """A slot, from its page `skip` on, and the engine's pages that go with it, in order."""

    slot: Slot
    skip: int
    pages: Sequence[int]


class CpuCopies:
    """Views of one rank's KV caches. Indices are checked before anything is copied: a wrong one raises IndexError.

    Raises Unsupported (SW-707) for tensors whose pages are not one contiguous piece of CPU memory each.
    """

    def __init__(self, kv_caches: Mapping[str, Any], num_pages: int) -> None:
        rows: list[Bytes] = []
        seen: set[int] = set()
        for name, tensor in kv_caches.items():
            if tensor.data_ptr() in seen:
                continue  # layers may share their KV
            seen.add(tensor.data_ptr())
            rows.append(_rows(name, tensor, num_pages))
        self._rows = rows
        self._team = Team()
        self.num_pages = num_pages
        self.page_bytes = sum(row.shape[1] for row in rows)

    def gather(self, shards: Sequence[Shard]) -> None:
        """Copies the engine's pages into the slots."""
        nbytes, pairs = self._pairs(shards)
        self._team.copy([Copy(slots, at, row, pages) for row, pages, slots, at in pairs], nbytes)

    def scatter(self, shards: Sequence[Shard]) -> None:
        """Copies the slots into the engine's pages."""
        nbytes, pairs = self._pairs(shards)
        self._team.copy([Copy(row, pages, slots, at) for row, pages, slots, at in pairs], nbytes)

    def close(self) -> None:
        self._team.close()

    def _pairs(self, shards: Sequence[Shard]) -> tuple[int, Iterator[tuple[Bytes, Index, Bytes, Index]]]:
        """How many bytes they are, and for each layer and run: the layer and which pages, the slab and which bytes."""
        for shard in shards:
            self._check(shard)
        pairs = (
            (row, run.page.span(run.count), run.slots, (run.slot.span(run.count), columns))
            for run in _runs(shards)
            for row, columns in self._columns(run.place)
        )
        return sum(len(shard.pages) for shard in shards) * self.page_bytes, pairs

    def _columns(self, place: int) -> Iterator[tuple[Bytes, slice]]:
        """Each layer, and where in a slot its part of the page at `place` lies."""
        at = place * self.page_bytes
        for row in self._rows:
            size = row.shape[1]
            yield row, slice(at, at + size)
            at += size

    def _check(self, shard: Shard) -> None:
        (slots, slot), skip, pages = shard
        fits = 0 <= slot < len(slots) and skip >= 0 and (skip + len(pages)) * self.page_bytes <= slots.shape[1]
        if not fits or not all(0 <= page < self.num_pages for page in pages):
            raise IndexError(f"pages {list(pages)} of {self.num_pages} do not fit slot {slot} from its page {skip} on")


class _Steps:
    """Evenly spaced numbers, as far as they are known."""

    __slots__ = ("first", "last", "step")

    def __init__(self, first: int) -> None:
        self.first = self.last = first
        self.step = 0

    def continued_by(self, number: int) -> bool:
        step = number - self.last
        return step == self.step if self.step else step != 0

    def add(self, number: int) -> None:
        self.step, self.last = number - self.last, number

    def span(self, count: int) -> slice:
        stop = self.first + count * (self.step or 1)
        return slice(self.first, stop if stop >= 0 else None, self.step or 1)


class _Run:
    """Page `place` of some slots of one slab and the engine's pages that go with them, both evenly spaced: one numpy
    call copies a layer of them all."""

    __slots__ = ("count", "page", "place", "slot", "slots")

    def __init__(self, slots: Bytes, slot: int, place: int, page: int) -> None:
        self.slots, self.slot, self.place, self.page = slots, _Steps(slot), place, _Steps(page)
        self.count = 1

    def takes(self, slots: Bytes, slot: int, page: int) -> bool:
        if slots is not self.slots or not (self.slot.continued_by(slot) and self.page.continued_by(page)):
            return False
        self.slot.add(slot)
        self.page.add(page)
        self.count += 1
        return True


def _runs(shards: Sequence[Shard]) -> list[_Run]:
    """All pages of the shards, each in one run."""
    runs: list[_Run] = []
    growing: dict[int, _Run] = {}  # by place
    for (slots, slot), skip, pages in shards:
        for place, page in enumerate(pages, skip):
            run = growing.get(place)
            if run is None or not run.takes(slots, slot, page):
                growing[place] = run = _Run(slots, slot, place, page)
                runs.append(run)
    return runs


def _rows(name: str, tensor: Any, num_pages: int) -> Bytes:
    """A layer's storage as (pages, bytes)."""
    import torch

    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.shape[0] != num_pages:
        raise Unsupported(
            "SW-707",
            what=f"the KV cache of layer {name}",
            why=f"shape {tuple(tensor.shape)}, stride {tensor.stride()}, device {tensor.device}: "
            f"not {num_pages} contiguous pages in CPU memory",
            fix="report this layout to stepwell",
        )
    view: Bytes = tensor.view(num_pages, -1).view(torch.uint8).numpy()
    return view
