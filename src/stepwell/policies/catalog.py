"""The policies by their names, and the placements by theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stepwell.policies.admission.always import Always
from stepwell.policies.admission.base import Admission
from stepwell.policies.admission.expected import ExpectedValue
from stepwell.policies.admission.second_touch import SecondTouchAdmission
from stepwell.policies.eviction.arc import Arc
from stepwell.policies.eviction.base import Eviction
from stepwell.policies.eviction.gdsf import Gdsf
from stepwell.policies.eviction.lfu import Lfu
from stepwell.policies.eviction.lru import Lru
from stepwell.policies.eviction.lru2 import Lru2
from stepwell.policies.eviction.s3fifo import S3Fifo
from stepwell.policies.eviction.sieve import Sieve
from stepwell.policies.eviction.valued import Valued
from stepwell.policies.placement.base import Placement
from stepwell.policies.placement.by_worth import ByWorth
from stepwell.policies.placement.hot import Hot
from stepwell.policies.placement.warm import Warm
from stepwell.policies.reuse import Reuse


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """Eviction and admission of one tier."""

    eviction: Eviction
    admission: Admission


def _auto() -> TierPolicy:
    valued = Valued(Reuse())
    return TierPolicy(valued, ExpectedValue(valued))


def _always(eviction: Callable[[], Eviction]) -> Callable[[], TierPolicy]:
    return lambda: TierPolicy(eviction(), Always())


MakePolicy = Callable[[], TierPolicy]

POLICIES: Mapping[str, MakePolicy] = {
    "auto": _auto,
    "lru": _always(Lru),
    "lfu": _always(Lfu),
    "arc": _always(Arc),
    "s3fifo": _always(S3Fifo),
    "sieve": _always(Sieve),
    "lru2": _always(Lru2),
    "second_touch": lambda: TierPolicy(Lru(), SecondTouchAdmission()),
    "gdsf": _always(Gdsf),
}
"""Each makes a new policy for one tier, as nothing is shared between them."""

PLACEMENTS: Mapping[str, Callable[[], Placement]] = {"by_worth": ByWorth, "hot": Hot, "warm": Warm}
