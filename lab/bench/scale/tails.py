"""What the policies do with windows: a model of five windows to one full layer, simulated on conversations that grow.

Windows lie in the same tier as prefixes and compete with them. Beside the policies as they are: `auto` with windows
that are worth no more than a prompt's first block, as where their place in the prompt is not known; and an oracle that
drops windows that a conversation has gone on behind, but for those at which prompts have parted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from lab.bench.report import Result, Row, Target
from stepwell.block.groups import Part, needed
from stepwell.demo.results.stats import Estimate
from stepwell.policies.catalog import POLICIES
from stepwell.policies.costs.hardware import preset
from stepwell.simulate.groups.model import ModelGroups
from stepwell.simulate.groups.replay import GroupsReplay
from stepwell.simulate.groups.store import PartKey, StoredPart
from stepwell.simulate.traces.load import load
from stepwell.simulate.traces.trace import Trace

MODEL = ModelGroups(20 << 10, ((1024, 100 << 10),))
PLAIN = ModelGroups(20 << 10)
SHARES = (0.05, 0.2)
COST = "llama-3.1-8b@h100"
MOST_POINTS = 1.0
"""Points of hits that dropping windows may gain before it would be worth a rule of its own."""


class Measured(GroupsReplay):
    """Notes the share of the tier that is held by windows that a conversation has gone on behind."""

    drops = False

    def __init__(self, trace: Trace, model: ModelGroups, policy: str, capacity: int) -> None:
        seconds = preset(COST).seconds
        super().__init__(trace, model, POLICIES[policy](), capacity, lambda first, last: seconds(last - first, first))
        self._next: dict[int, set[int]] = {}  # ids that stand behind an id: two at most are of interest
        self._behind: set[PartKey] = set()
        self._ids: list[int] = []
        self.shares: list[float] = []

    def _blocks(self, i: int) -> tuple[list[int], int]:
        self._ids, prompt = super()._blocks(i)
        return self._ids, prompt

    def request(self, i: int) -> tuple[int, int]:
        found = super().request(i)
        ids = self._ids
        ends = [(int(self._trace.inputs[i]) - 1) // self._tokens, len(ids)]
        for one, other in pairwise(ids):
            after = self._next.setdefault(one, set())
            if len(after) < 2:
                after.add(other)
        ends += [block + 1 for block, id in enumerate(ids[:-1]) if len(self._next[id]) > 1]
        kept = {place for end in ends for place in needed(self._rules, self._parts, self._tokens, end)}
        for block, id in enumerate(ids):
            for part in self._parts:
                self._see((id, part.group), kept=(block, part) in kept)
        if 2 * i >= len(self._trace) and not i % 20:
            self._behind = {key for key in self._behind if self.store.has(key)}
            held = sum(self.store.parts[key].size for key in self._behind)
            self.shares.append(held / max(1, self.store.held))
        return found

    def _see(self, key: PartKey, *, kept: bool) -> None:
        self._behind.discard(key)
        if self.store.has(key) and not kept:
            if self.drops:
                self.store.drop(self.store.parts[key])
            else:
                self._behind.add(key)


class Dropping(Measured):
    drops = True


class Placeless(Measured):
    def _tail(self, ids: Sequence[int], block: int, part: Part) -> StoredPart:
        size = self._sizes[part.group]
        seconds = self._cost(0, self._tokens) * size / self._unit
        return self.store.part((ids[block], part.group), size, seconds)


def run(quick: bool) -> Result:
    conversations = 10 if quick else 40
    trace = load(f"agentic:conversations={conversations}", open_=min(conversations, 64), block_tokens=512).trace
    rows: list[Row] = []
    for share in SHARES[-1:] if quick else SHARES:
        capacity = max(1, int(share * trace.distinct))
        where = f"{share:.0%} of the working set"
        for policy in ("lru", "auto"):
            windows = _row("  with windows", Measured(trace, MODEL, policy, capacity), trace)
            dropping = _row("  the oracle", Dropping(trace, MODEL, policy, capacity), trace)
            rows += [_row(f"{where}, {policy}: hits without windows", Measured(trace, PLAIN, policy, capacity), trace)]
            rows += [windows, dropping]
            gained = _exactly(_value(dropping) - _value(windows))
            rows.append(Row("  what the oracle gains", "points", gained, Target("<=", MOST_POINTS)))
        first = _row("  windows worth no more than a first block", Placeless(trace, MODEL, "auto", capacity), trace)
        rows.append(first)
    remarks = [
        f"{conversations} conversations of the generator `agentic`, {len(trace):,} requests, "
        f"{trace.distinct * trace.block_tokens / 1e6:,.1f} M distinct tokens in blocks of {trace.block_tokens}; "
        "20 KiB a token in full layers, windows of 1,024 tokens with 100 KiB a token",
        "beside: what the prefixes alone would have hit; the share of the tier that windows hold, and of these what "
        "conversations have gone on behind; means over the second half of the requests",
    ]
    return Result("tails", rows, {"requests": len(trace)}, remarks)


def _row(what: str, replay: Measured, trace: Trace) -> Row:
    ran = replay.run()
    tokens = trace.block_tokens / trace.input_tokens
    hits = 100 * float(ran.hits.sum()) * tokens
    prefixes, behind = 100 * float(ran.prefixes.sum()) * tokens, float(np.mean(replay.shares)) if replay.shares else 0.0
    beside = f"{prefixes:.1f} by prefixes, {ran.tail_share:.1%} of the tier, {behind:.1%} gone on behind"
    return Row(what, "%", _exactly(hits), beside=beside)


def _value(row: Row) -> float:
    return row.measured.value if row.measured is not None else 0.0


def _exactly(value: float) -> Estimate:
    return Estimate(round(value, 3), round(value, 3), round(value, 3), 1)
