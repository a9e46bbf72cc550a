"""Counters of the well, and the ids of blocks evicted lately (to tell 'evicted' from 'never seen')."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from typing import assert_never

from stepwell import events as e
from stepwell.block.namespace import BlockId
from stepwell.block.tier import Figures

_REMEMBERED = 1 << 16
_MAX_NAMES = 64
_NAME = re.compile("[a-z_]{1,48}")  # no digits: neither tokens nor digests pass for one
_MAX_COUNT = (1 << 63) - 1  # what a message can carry of a count


class Ghosts:
    """The ids of the last 65,536 blocks that were evicted, 8 bytes each. Wrong in about one of 10^14 look-ups."""

    def __init__(self) -> None:
        self._ids: OrderedDict[bytes, None] = OrderedDict()

    def add(self, id: BlockId) -> None:
        self._ids[id[:8]] = None
        if len(self._ids) > _REMEMBERED:
            self._ids.popitem(last=False)

    def __contains__(self, id: BlockId) -> bool:
        return id[:8] in self._ids


class Counters:
    """Counts events, from the well's start. Reasons are the metric labels of misses and of refused spills."""

    def __init__(self) -> None:
        self.total: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}
        self.tiers: dict[str, dict[str, int | float]] = {}
        self.misses: Counter[str] = Counter()
        self.refused_spills: Counter[str] = Counter()
        self.drops: Counter[str] = Counter()
        self.engine: Counter[str] = Counter()

    def __call__(self, event: e.Event) -> None:
        match event:
            case e.RunAnswered(hits, _, missed, _, tail=True):
                self.total["tail_requests"] += 1
                self.total["tail_hits"] += hits
                self.total["tail_misses"] += missed
            case e.RunAnswered(hits, staged, missed, reason):
                self.total["requests"] += 1
                self.total["hits"] += hits
                self.total["hits_staged"] += staged
                if missed:
                    self.misses[reason] += missed
            case e.BlocksRecalled(blocks, nbytes):
                self.total["recalled_blocks"] += blocks
                self.total["recalled_bytes"] += nbytes
            case e.BlocksSpilled(blocks, nbytes):
                self.total["spilled_blocks"] += blocks
                self.total["spilled_bytes"] += nbytes
            case e.SpillRefused(reason):
                self.refused_spills[reason] += 1
            case e.BlockDropped(reason):
                self.drops[reason] += 1
            case e.BlocksStaged(tier, blocks, nbytes, seconds):
                self._moved(tier, "recall", blocks, nbytes, seconds)
            case e.BlocksWritten(tier, blocks, nbytes, seconds):
                self._moved(tier, "spill", blocks, nbytes, seconds)
            case e.BlockNotRead(tier, reason):
                self._of(tier, f"not_recalled_{reason}", 1)
            case e.BlockNotWritten(tier, reason):
                self._of(tier, f"skipped_{reason}", 1)
            case e.BlocksPrefetched(tier, blocks):
                self._of(tier, "prefetched_blocks", blocks)
            case e.PrefetchEnded(used, unused):
                self.total["prefetches_used"] += used
                self.total["prefetches_unused"] += unused
            case e.TierBreakerMoved(tier, operation, "open", _):
                self._of(tier, f"{operation}s_stopped", 1)
            case e.TierBreakerMoved():
                pass
            case e.TierRecovered(tier, blocks, seconds, _):
                self._of(tier, "recovered_blocks", blocks)
                self._of(tier, "recovery_seconds", seconds)
            case e.SessionOpened():
                self.total["sessions_opened"] += 1
            case e.SessionEnded():
                self.total["sessions_ended"] += 1
            case e.MessageRefused():
                self.total["messages_refused"] += 1
            case e.SlabServing():
                self.total["slabs_made"] += 1
            case e.SlabRemoved():
                self.total["slabs_retired"] += 1
            case e.ArenaTroubled():
                self.total["troubles"] += 1
            case e.CanaryHeard(excess):
                self.total["canaries_clean" if excess <= 1 else "canaries_mismatched"] += 1
            case e.NamespaceQuarantined() | e.QuarantineLifted() | e.PauseChanged():
                pass  # `stats` asks the parts how many there are
            case e.RecallDecided(prefix=None):
                self.total[f"decided_{event.why}"] += 1
            case e.RecallDecided():
                pass  # of a window or a state: the decision on the prefix that it goes with is counted
            case e.RecallEnded(_, _, waited_s, read_s, gave_up, regret_s, best_s, _):
                if gave_up:
                    self.total[f"gave_up_{gave_up}"] += 1
                if gave_up == "limit":
                    self._took("waited_in_vain_seconds", max(0.0, waited_s - read_s))
                if regret_s is not None and best_s is not None:
                    self._took("decision_regret_seconds", regret_s)
                    self._took("decision_best_seconds", best_s)
            case e.GivenUpTooSoon(seconds):
                self._took("given_up_too_soon_seconds", seconds)
            case e.EngineReported(counts):
                self._reported(counts)
            case never:
                assert_never(never)

    def _moved(self, tier: str, op: str, blocks: int, nbytes: int, seconds: float) -> None:
        self._of(tier, f"{op}ed_blocks", blocks)
        self._of(tier, f"{op}ed_bytes", nbytes)
        self._of(tier, f"{op}_seconds", seconds)

    def _of(self, tier: str, name: str, n: float) -> None:
        of = self.tiers.setdefault(tier, {})
        of[name] = of.get(name, 0) + n

    def _took(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def _reported(self, counts: dict[str, int]) -> None:
        """Names and numbers come from outside, and are shown: at most 64 names are kept, only such as name a kind of
        event, and none counts beyond what an answer can say."""
        for name, n in counts.items():
            if name in self.engine or (len(self.engine) < _MAX_NAMES and _NAME.fullmatch(name)):
                self.engine[name] = min(self.engine[name] + max(n, 0), _MAX_COUNT)

    def values(self) -> dict[str, int | float]:
        """Figures of the well; the usual sums are there from the start."""
        names = (
            "requests",
            "hits",
            "hits_staged",
            "recalled_blocks",
            "recalled_bytes",
            "spilled_blocks",
            "spilled_bytes",
            "messages_refused",
        )
        table: dict[str, int | float] = dict.fromkeys(names, 0)
        table.update(self.total)
        table.update({name: round(seconds, 6) for name, seconds in self.seconds.items()})
        for prefix, counter in (
            ("misses", self.misses),
            ("spills_refused", self.refused_spills),
            ("dropped", self.drops),
            ("engine", self.engine),
        ):
            table.update({f"{prefix}_{name}": n for name, n in counter.items()})
        return table

    def of(self, tier: str) -> Figures:
        """Figures of one tier below the host tier."""
        return {name: round(n, 6) for name, n in self.tiers.get(tier, {}).items()}
