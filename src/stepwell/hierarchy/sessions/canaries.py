"""Judges whether a namespace holds the KV of one model only, by stored blocks that engines have computed once more.

A fingerprint can be wrong: `weights_id` set by hand, weights changed in memory without a reset, a fault in a backend.
Then blocks of two models meet in one namespace, and each of them is what was spilled, bit for bit. What gives them away
is that an engine, given the same tokens, computes something else:

    an engine's Canary ──► at most the bound of each layer: clean ──► the first 1,000 of these make the bound
                      └──► above it: a mismatch ──► a second one, before 1,000 clean ones: quarantine

A namespace in quarantine answers misses and takes no spills until an operator clears it. Why and by which numbers:
docs/design/adr/0010-canary.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stepwell.events import CanaryHeard, NamespaceQuarantined, QuarantineLifted, Sink
from stepwell.hierarchy.arena.origin import Origin
from stepwell.hierarchy.saved import StateStore, Tags
from stepwell.io.clock import Clock

KNOWN = 1000
"""Clean canaries that make a bound; and those after which a single mismatch is forgotten."""

MARGIN = 4.0
"""A layer's bound is so many times the largest error among them."""

PRIOR = {"float32": 1e-2, "float16": 0.1, "bfloat16": 0.25}
"""Largest bound, which holds until KNOWN canaries were clean, by the kind of the numbers."""

FLOOR = {"float32": 1e-3, "float16": 0.01, "bfloat16": 0.03}
"""Smallest bound: an engine that has only run one request at a time has seen no rounding differ."""

MAX_ERRORS = 1 << 14
"""Largest number of errors in one Canary: two for each layer of each rank."""

MAX_NAMESPACES = 64
"""Namespaces of one tenant that are calibrated at a time, and that may be in quarantine; the earliest are forgotten."""

ALARM_EVERY_S = 10.0
"""One tenant's alarms are at least so far apart: each is a walk through all that is cached. A mismatch that comes too
soon for one stays the first of two."""

_LARGEST = 1e9  # an error that is not a number, or no bound's multiple, is this many times it


@dataclass(slots=True)
class Calibration:
    """Rounding errors seen in one namespace. `worst` is the largest error of each layer among the first KNOWN clean
    canaries; `suspect`, how many had been clean at the last mismatch."""

    worst: list[float]
    clean: int = 0
    suspect: int | None = None

    def bounds(self, kind: str) -> list[float]:
        most, least = PRIOR.get(kind, max(PRIOR.values())), FLOOR.get(kind, max(FLOOR.values()))
        if self.clean < KNOWN:
            return [most] * len(self.worst)
        return [min(most, max(least, MARGIN * error)) for error in self.worst]

    def excess(self, kind: str, errors: Sequence[float]) -> float:
        """The largest multiple of its bound that an error is."""
        ratios = (error / bound for error, bound in zip(errors, self.bounds(kind), strict=True))
        return max(ratio if ratio < _LARGEST else _LARGEST for ratio in ratios)

    def agreed(self, errors: Sequence[float]) -> None:
        """Notes a clean canary. Once there is a bound it stays: what is clean by it must not widen it."""
        if self.clean < KNOWN:
            self.worst = [max(pair) for pair in zip(self.worst, errors, strict=True)]
        self.clean += 1
        if self.suspect is not None and self.clean - self.suspect >= KNOWN:
            self.suspect = None

    def differed(self) -> bool:
        """Notes a mismatch. True: it is the second."""
        again, self.suspect = self.suspect is not None, self.clean
        return again


@dataclass(slots=True)
class _Judged:
    """Calibrations and quarantines of one tenant, so that no tenant can have another's forgotten."""

    known: OrderedDict[bytes, Calibration] = field(default_factory=OrderedDict)
    barred: list[Tags] = field(default_factory=list)
    quiet_until: float = 0.0


class CanaryJudge:
    """`earlier`: namespaces of any tenant that were in quarantine when the well before ended."""

    def __init__(self, clock: Clock, emit: Sink, earlier: Iterable[Tags] = (), store: StateStore | None = None) -> None:
        self._clock = clock
        self._emit = emit
        self._store = store or StateStore()
        self._earlier = list(earlier)
        self._tenants: dict[str, _Judged] = {}
        self._tags: frozenset[bytes] = frozenset()
        self._look()

    @property
    def barred(self) -> list[Tags]:
        """Namespaces in quarantine."""
        return [*self._earlier, *(tags for judged in self._tenants.values() for tags in judged.barred)]

    def bars(self, origins: Iterable[Origin]) -> bool:
        """True if nothing of this namespace may be recalled or spilled."""
        return bool(self._tags) and any(origin.tag in self._tags for origin in origins)

    def heard(self, tenant: str, origins: Sequence[Origin], kind: str, errors: Sequence[float]) -> bool:
        """Judges one canary of a tenant's engine. True: its namespace is in quarantine from now on, and its blocks are
        to go."""
        if self.bars(origins):
            return False
        judged, tag = self._tenants.setdefault(tenant, _Judged()), origins[0].tag
        known = judged.known.setdefault(tag, Calibration([0.0] * len(errors)))
        judged.known.move_to_end(tag)
        if len(judged.known) > MAX_NAMESPACES:
            judged.known.popitem(last=False)
        if len(known.worst) != len(errors):  # one layout has one number of layers: anything else cannot be compared
            return False
        excess = known.excess(kind, errors)
        self._emit(CanaryHeard(excess))
        if excess <= 1:
            known.agreed(errors)
            return False
        now = self._clock.now()
        if not known.differed() or now < judged.quiet_until:
            return False
        judged.quiet_until = now + ALARM_EVERY_S
        del judged.known[tag]
        judged.barred = [*judged.barred, tuple(origin.tag for origin in origins)][-MAX_NAMESPACES:]
        self._changed()
        self._emit(NamespaceQuarantined(tag, excess))
        return True

    def lift(self, namespace: bytes, barred: Iterable[Tags]) -> None:
        """Ends the quarantine of this namespace, or of all (empty), which an operator has cleared. `barred`: those in
        quarantine when the clear began."""
        lifted = [tags for tags in barred if tags in self.barred and (not namespace or namespace in tags)]
        if not lifted:
            return
        self._earlier = [tags for tags in self._earlier if tags not in lifted]
        for judged in self._tenants.values():
            judged.barred = [tags for tags in judged.barred if tags not in lifted]
        self._changed()
        for tags in lifted:
            self._emit(QuarantineLifted(tags[0]))

    def _changed(self) -> None:
        self._look()
        self._store.save_barred(self.barred)

    def _look(self) -> None:
        self._tags = frozenset(tag for tags in self.barred for tag in tags)
