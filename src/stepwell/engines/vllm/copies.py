"""Copying between the engine's pages and slots, on CPU. The one class that a CUDA twin will replace.

A shard lies in its slot page by page, and within a page layer by layer:

    slot:  | page 0: layer 0 | layer 1 | ... | page 1: layer 0 | ... |

Pages are opaque bytes: on CPU their content is packed for the instruction set, which is part of the namespace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from stepwell.client.worker import Slot
from stepwell.engines.vllm.canary import relative_error
from stepwell.engines.vllm.team import Copy, Numbers, Team
from stepwell.errors import Unsupported
from stepwell.io.memory import Bytes


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
        self._kinds: list[tuple[str, int]] = []  # of each row: its numbers, and the heads of a page
        for name, tensor in kv_caches.items():
            if tensor.data_ptr() in seen:
                continue  # layers may share their KV
            seen.add(tensor.data_ptr())
            rows.append(_rows(name, tensor, num_pages))
            self._kinds.append((str(tensor.dtype).removeprefix("torch."), int(tensor.shape[1])))
        self._rows = rows
        self._team = Team()
        self.num_pages = num_pages
        self.page_bytes = sum(row.shape[1] for row in rows)

    def gather(self, shards: Sequence[Shard]) -> None:
        """Copies the engine's pages into the slots, which they must fill: what else is in a slot is another block's."""
        for (slots, slot), skip, pages in shards:
            if skip or len(pages) * self.page_bytes != slots.shape[1]:
                raise IndexError(f"{len(pages)} pages do not fill slot {slot} of {slots.shape[1]} bytes")
        runs = self._runs(shards, _EvenRun)
        copies = [Copy(run.slots, at, row, pages) for run in runs for row, pages, at in self._layers(run)]
        self._team.copy(copies, self._nbytes(shards))

    def scatter(self, shards: Sequence[Shard]) -> None:
        """Copies the slots into the engine's pages."""
        runs = self._runs(shards, _Run)
        copies = [Copy(row, pages, run.slots, at) for run in runs for row, pages, at in self._layers(run)]
        self._team.copy(copies, self._nbytes(shards))

    def errors(self, shard: Shard) -> list[float]:
        """How far each layer's K, then its V, in the engine's pages is from the slot: relative errors. A page holds
        head by head all of K, then all of V. Raises KeyError for numbers that cannot be compared."""
        self._check(shard)
        (slots, slot), skip, pages = shard
        stored = slots[slot].reshape(-1, self.page_bytes)[skip : skip + len(pages)]
        errors: list[float] = []
        at = 0
        for row, (kind, heads) in zip(self._rows, self._kinds, strict=True):
            size = row.shape[1]
            shape = (len(pages), heads, 2, -1)
            fresh, kept = row[np.array(pages)].reshape(shape), stored[:, at : at + size].reshape(shape)
            errors += [relative_error(fresh[:, :, half], kept[:, :, half], kind) for half in (0, 1)]
            at += size
        return errors

    def close(self) -> None:
        self._team.close()

    def _nbytes(self, shards: Sequence[Shard]) -> int:
        return sum(len(shard.pages) for shard in shards) * self.page_bytes

    def _layers(self, run: _Run) -> Iterator[tuple[Bytes, slice | Numbers, tuple[slice, slice]]]:
        """Each layer, the run's pages of it, and where in the slab they lie."""
        at = run.place * self.page_bytes
        pages, slots = run.where, run.slot.span(len(run.pages))
        for row in self._rows:
            size = row.shape[1]
            yield row, pages, (slots, slice(at, at + size))
            at += size

    def _runs(self, shards: Sequence[Shard], kind: type[_Run]) -> list[_Run]:
        """All pages of the shards, each in one run."""
        for shard in shards:
            self._check(shard)
        runs: list[_Run] = []
        growing: dict[int, _Run] = {}  # by place
        for (slots, slot), skip, pages in shards:
            for place, page in enumerate(pages, skip):
                run = growing.get(place)
                if run is None or not run.takes(slots, slot, page):
                    growing[place] = run = kind(slots, slot, place, page)
                    runs.append(run)
        return runs

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
    """Page `place` of evenly spaced slots of one slab, and the engine's pages that go with them: one numpy call copies
    a layer of them all, and the fewer calls, the less two threads wait for the GIL."""

    def __init__(self, slots: Bytes, slot: int, place: int, page: int) -> None:
        self.slots, self.slot, self.place, self.pages = slots, _Steps(slot), place, [page]

    def takes(self, slots: Bytes, slot: int, page: int) -> bool:
        """True if this page continues the run; it is part of it then."""
        if slots is not self.slots or not self.slot.continued_by(slot):
            return False
        self.slot.add(slot)
        self.pages.append(page)
        return True

    @property
    def where(self) -> slice | Numbers:
        """The engine's pages as numpy takes them. Assigning to a list of them copies once, reading one copies twice."""
        return np.array(self.pages)


class _EvenRun(_Run):
    """The engine's pages are evenly spaced too."""

    def __init__(self, slots: Bytes, slot: int, place: int, page: int) -> None:
        super().__init__(slots, slot, place, page)
        self._page = _Steps(page)

    def takes(self, slots: Bytes, slot: int, page: int) -> bool:
        if not self._page.continued_by(page) or not super().takes(slots, slot, page):
            return False
        self._page.add(page)
        return True

    @property
    def where(self) -> slice:
        return self._page.span(len(self.pages))


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
