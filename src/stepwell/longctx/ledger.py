"""Counts of pages moved, hit, predicted and left out: the only source of every figure that this package reports.

Also as Prometheus text, to be added to a metrics page."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

_RECENT = 32


@dataclass(slots=True)
class Ledger:
    """Ledger of one cache; counts only grow. `moved` and `fetched` are thread-safe, since a fetching thread calls them.

    `bytes`: by (from, to, kind), as transferred, scales included. Kinds: "spill", "draft" (pages for a sparse step),
    "exact" (pages streamed for an exact pass), "warm" (pages fetched when decoding began), "recall" (pages that take
    residence after being attended in place), "partial" (queries and partial results of attending in place), "index"
    (keys that go to where they are scored), "score" (queries that go there, pages and scores that return).
    """

    bytes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    pages: Counter[str] = field(default_factory=Counter)
    """selected = hits + fetched - mispredicted + in_place + late, once all requested pages have arrived. early:
    selected pages that were fetched before; late: those that their step did not wait for."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """fetch: reading and decoding; stall: time that the model waited for it."""
    steps: int = 0
    """Number of decode steps of a layer, in all layers together."""
    exact_passes: int = 0
    """Number of forward passes over all pages: parts of prompts, exact steps, checks of drafts."""
    verifies: int = 0
    drafted: int = 0
    accepted: int = 0
    generated: int = 0
    uncovered_sum: float = 0.0
    uncovered_max: float = 0.0
    true_uncovered_sum: float = 0.0
    audited: int = 0
    alarms: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes in use now: hot, index, host, disk; near: the index in another process."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _above: bool = field(default=False, repr=False)
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT), repr=False)

    def moved(self, source: str, target: str, kind: str, nbytes: int) -> None:
        with self._lock:
            self.bytes[source, target, kind] += nbytes

    def fetched(self, seconds: float) -> None:
        with self._lock:
            self.seconds["fetch"] += seconds

    def uncovered(self, share: float, alarm: float) -> bool:
        """Notes the estimated share of attention that a step left out. True when the average of recent ones has just
        risen above `alarm`."""
        self._recent.append(share)
        self.uncovered_sum += share
        self.uncovered_max = max(self.uncovered_max, share)
        above = len(self._recent) == _RECENT and sum(self._recent) / _RECENT > alarm
        risen, self._above = above and not self._above, above
        self.alarms += risen
        return risen

    def cold_to_hot(self, *kinds: str) -> int:
        """Bytes copied from cold tiers, of these kinds or of all kinds of pages."""
        chosen = kinds or ("draft", "exact", "warm", "recall")
        with self._lock:
            return sum(n for (_, target, kind), n in self.bytes.items() if target == "hot" and kind in chosen)

    def snapshot(self) -> dict[str, int | float | dict[str, int]]:
        """Plain values, for JSON and metrics."""
        with self._lock:
            moved = {f"{source} to {target}: {kind}": n for (source, target, kind), n in sorted(self.bytes.items())}
            seconds = dict(self.seconds)
        wanted = self.pages["selected"]
        return {
            "bytes_cold_to_hot": self.cold_to_hot(),
            "bytes_hot_to_cold": sum(n for name, n in moved.items() if name.startswith("hot to ")),
            "bytes_score": sum(n for name, n in moved.items() if name.endswith(": score")),
            "moved": moved,
            "index_bytes": self.sizes.get("index", 0),
            "near_index_bytes": self.sizes.get("near", 0),
            "hot_bytes": self.sizes.get("hot", 0),
            "host_bytes": self.sizes.get("host", 0),
            "disk_bytes": self.sizes.get("disk", 0),
            "layer_steps": self.steps,
            "pages": dict(self.pages),
            "hit_rate": self.pages["hits"] / wanted if wanted else 0.0,
            "exact_passes": self.exact_passes,
            "verifies": self.verifies,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "generated": self.generated,
            "accepted_per_verify": self.accepted / self.verifies if self.verifies else 0.0,
            "uncovered_mass": self.uncovered_sum / self.steps if self.steps else 0.0,
            "uncovered_mass_max": self.uncovered_max,
            "true_uncovered_mass": self.true_uncovered_sum / self.audited if self.audited else 0.0,
            "alarms": self.alarms,
            "fetch_seconds": seconds.get("fetch", 0.0),
            "stall_seconds": seconds.get("stall", 0.0),
        }


_HELP = {
    "bytes_total": ("counter", "Bytes moved between tiers, scales included."),
    "pages_total": ("counter", "Pages: selected, hits, early, fetched, late, mispredicted, in_place."),
    "tokens_total": ("counter", "Tokens: drafted, accepted, generated."),
    "passes_total": ("counter", "Forward passes: exact ones, and checks of drafts."),
    "seconds_total": ("counter", "Seconds: fetching, and of these, what the model waited (stall)."),
    "alarms_total": ("counter", "Times that the estimated attention left out rose above the policy's alarm."),
    "uncovered_mass": ("gauge", "Share of attention left out, as estimated by the policy, averaged over its steps."),
    "held_bytes": ("gauge", "Bytes in use by tier."),
}


def prometheus(ledger: Ledger) -> str:
    """Exposition text, with metrics `stepwell_longctx_...`. It has no prompts and no names."""
    values: dict[str, list[tuple[str, float]]] = {name: [] for name in _HELP}
    for (source, target, kind), nbytes in sorted(ledger.bytes.items()):
        values["bytes_total"].append((f'{{from="{source}",to="{target}",kind="{kind}"}}', nbytes))
    values["pages_total"] = [(f'{{kind="{kind}"}}', count) for kind, count in sorted(ledger.pages.items())]
    for kind in ("drafted", "accepted", "generated"):
        values["tokens_total"].append((f'{{kind="{kind}"}}', getattr(ledger, kind)))
    values["passes_total"] = [('{kind="exact"}', ledger.exact_passes), ('{kind="verify"}', ledger.verifies)]
    values["seconds_total"] = [(f'{{kind="{kind}"}}', spent) for kind, spent in sorted(ledger.seconds.items())]
    values["alarms_total"] = [("", ledger.alarms)]
    values["uncovered_mass"] = [("", ledger.uncovered_sum / ledger.steps if ledger.steps else 0.0)]
    values["held_bytes"] = [(f'{{tier="{tier}"}}', nbytes) for tier, nbytes in sorted(ledger.sizes.items())]
    lines = []
    for name, (kind, text) in _HELP.items():
        full = f"stepwell_longctx_{name}"
        lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
        lines += [f"{full}{labels} {value:.15g}" for labels, value in values[name]]
    return "\n".join(lines) + "\n"
