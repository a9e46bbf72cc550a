"""Replay of one trace on one tier, for a model that keeps windows or states: by the rules that engines follow.

A request goes on behind the last block up to which its prefix is held and behind which a window, or a state, is. It
stores its prefix, and windows and states where a request may go on behind it: where its prompt ends, behind each block
of its answer, and where its prefix was held farther than it could go on. A state is not stored there, since no step of
an engine ends there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepwell.block.groups import GroupKind, Part, longest, needed, parts_of
from stepwell.policies.catalog import TierPolicy
from stepwell.simulate.groups.model import ModelGroups
from stepwell.simulate.groups.store import PartStore, StoredPart
from stepwell.simulate.optimal import next_uses
from stepwell.simulate.traces.forest import Cost
from stepwell.simulate.traces.trace import Ints, Trace

MAX_PLACES = 1024
"""Blocks at the end of a prefix that are looked at for a place to go on, as engines do."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupsReplayed:
    """`hits`: number of blocks of each request behind which it went on, `prefixes`: that its prefix was held for, [n].
    Bytes `stored` each time, and of these what `stored_tails` took; `tail_share`: of the bytes that were held what
    windows and states took, the mean over the requests of the second half."""

    hits: Ints
    prefixes: Ints
    stored_bytes: int
    stored_tail_bytes: int
    tail_share: float


class GroupsReplay:
    """`capacity`: in blocks of the prefix, of whose bytes it has as many."""

    def __init__(self, trace: Trace, model: ModelGroups, policy: TierPolicy, capacity: int, cost: Cost) -> None:
        self._trace = trace
        self._tokens = trace.block_tokens
        self._cost = cost
        self._unit, self._sizes = model.sizes(self._tokens)
        self._rules = model.rules(self._tokens)
        self._parts = parts_of(self._rules, self._tokens) if self._rules else ()
        self._unit_bytes = model.full_bytes * self._tokens / self._unit
        self._following = next_uses(trace)
        self._unknown = 0  # blocks of answers that no later request has
        self.store = PartStore(policy, capacity * self._unit, self._unit)

    def run(self) -> GroupsReplayed:
        trace, store = self._trace, self.store
        hits, prefixes = np.zeros(len(trace), np.int64), np.zeros(len(trace), np.int64)
        shares: list[float] = []
        for i, time in enumerate(trace.times.tolist()):
            store.begin(time)
            hits[i], prefixes[i] = self.request(i)
            if 2 * i >= len(trace):
                shares.append(store.held_tails / max(1, store.held))
        stored, tails = (round(n * self._unit_bytes) for n in (store.entered, store.entered_tails))
        return GroupsReplayed(hits, prefixes, stored, tails, float(np.mean(shares)) if shares else 0.0)

    def request(self, i: int) -> tuple[int, int]:
        """Blocks behind which request `i` goes on, and for which its prefix is held."""
        ids, prompt = self._blocks(i)
        last = max(0, int(self._trace.inputs[i]) - 1) // self._tokens
        reach = 0
        while reach < prompt and self.store.has((ids[reach], -1)):
            reach += 1
        hit = self._place(ids, min(reach, last))
        path = self._prefix(ids)
        found = [self._tail(ids, *place) for place in needed(self._rules, self._parts, self._tokens, hit)]
        self.store.use(path[:prompt][::-1])
        self.store.use(found[::-1])
        tails = self._wanted(ids, hit, reach, last, prompt)
        self.store.let_in(path[reach:prompt])
        self._store(tails)
        stored = [*path[:prompt], *tails]
        for block in range(prompt, len(ids)):  # as the answer grows
            grown = [path[block]], [self._tail(ids, block, part) for part in self._parts]
            for parts in grown:
                self._store(parts)
                stored += parts
        self.store.settle([*found, *stored])
        return hit, reach

    def _blocks(self, i: int) -> tuple[list[int], int]:
        """Ids of the full blocks of a prompt and its answer, and how many are the prompt's. What a later prompt has
        where the answer was is the answer."""
        trace = self._trace
        tokens = int(trace.inputs[i])
        ids = trace.request(i)[: tokens // self._tokens].tolist()
        prompt, end = len(ids), (tokens + max(0, int(trace.outputs[i]) - 1)) // self._tokens
        after = int(self._following[trace.starts[i] + prompt - 1]) if prompt else len(trace)
        if after < len(trace):
            ids += trace.request(after)[prompt : min(end, int(trace.inputs[after]) // self._tokens)].tolist()
        while len(ids) < end:
            self._unknown += 1
            ids.append(-self._unknown)
        return ids, prompt

    def _place(self, ids: Sequence[int], blocks: int) -> int:
        """The last place up to there with a window and a state."""
        if not self._rules:
            return blocks
        first = max(0, blocks - MAX_PLACES)
        places = ((block, part) for block in range(first, blocks) for part in self._parts)
        here = {(block, part) for block, part in places if self.store.has((ids[block], part.group))}
        return longest(self._rules, self._parts, self._tokens, blocks, here)

    def _wanted(self, ids: Sequence[int], hit: int, reach: int, last: int, prompt: int) -> list[StoredPart]:
        """Parts of windows and states to be stored of a prompt: near its end, and where another one has parted from
        it."""
        wanted = {*needed(self._rules, self._parts, self._tokens, last)}
        wanted.update((block, part) for block in range(last, prompt) for part in self._parts)
        if hit < min(reach, last):
            parting = needed(self._rules, self._parts, self._tokens, reach)
            wanted.update(place for place in parting if self._rules[place[1].group].kind is not GroupKind.STATE)
        places = sorted((block, part.group, part) for block, part in wanted if block >= hit)
        return [self._tail(ids, block, part) for block, _, part in places]

    def _store(self, parts: Sequence[StoredPart]) -> None:
        self.store.use([part for part in parts if not part.held][::-1])
        self.store.let_in(parts)

    def _prefix(self, ids: Sequence[int]) -> list[StoredPart]:
        path: list[StoredPart] = []
        for block, id in enumerate(ids):
            seconds = self._cost(block * self._tokens, (block + 1) * self._tokens)
            path.append(self.store.part((id, -1), self._unit, seconds, path[-1] if path else None))
        return path

    def _tail(self, ids: Sequence[int], block: int, part: Part) -> StoredPart:
        """As much worth as a block of the prefix that lies there, for its size."""
        size = self._sizes[part.group]
        seconds = self._cost(block * self._tokens, (block + 1) * self._tokens)
        return self.store.part((ids[block], part.group), size, seconds * size / self._unit)
