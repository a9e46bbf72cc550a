"""Which steps are under way, what each computes and writes, and when all ranks have ended it well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MOST_STEPS = 64
"""Steps whose reports may be outstanding; an older one will not come any more."""


class Computes(NamedTuple):
    """Of a request in a step: its life, tokens of it that are computed when the step has ended, and how many of them
    the step computes itself."""

    request: str
    life: int
    after: int
    tokens: int


@dataclass(slots=True)
class _Step:
    computes: list[Computes]
    ranks: int = 0  # that have ended it well


@dataclass(slots=True)
class Steps:
    """A step is confirmed when `world` ranks have reported it. Steps end in order: one that is not confirmed when a
    later one is will never be, it raised or its report is lost."""

    world: int
    _under_way: dict[int, _Step] = field(default_factory=dict)

    def begin(self, number: int, computes: list[Computes]) -> None:
        if not computes:
            return
        self._under_way[number] = _Step(computes)
        while len(self._under_way) > MOST_STEPS:
            del self._under_way[next(iter(self._under_way))]

    def ended(self, ranks: Mapping[int, int]) -> Iterator[Computes]:
        """What is confirmed now. `ranks`: how many more have ended each step."""
        for number, more in ranks.items():
            step = self._under_way.get(number)
            if step is None:
                continue
            step.ranks += more
            if step.ranks < self.world:
                continue
            for old in [n for n in self._under_way if n <= number]:
                del self._under_way[old]
            yield from step.computes


def fresh_pages(out: Any) -> list[int]:
    """Pages that requests of this step got with it, as vLLM's SchedulerOutput says: others were taken by earlier steps,
    and named then. Some may be another request's as well (a hit), which is read only."""
    pages = [page for new in out.scheduled_new_reqs for page in new.block_ids[0]]
    for more in out.scheduled_cached_reqs.new_block_ids:
        if more:
            pages += more[0]
    return pages
