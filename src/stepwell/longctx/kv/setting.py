"""State that the layers of one cache share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from stepwell.longctx.kv.budget import HotBudget
from stepwell.longctx.kv.fetch.fetcher import Fetcher
from stepwell.longctx.kv.profile import Profile
from stepwell.longctx.ledger import Ledger
from stepwell.longctx.near.process import NearProcess
from stepwell.longctx.policy import AttentionMode, Policy
from stepwell.longctx.store.base import PageStore

_LATE_SHARE = 4
"""A quarter of the pool's room: pages that come for the next step take the place of others there."""


@dataclass(slots=True)
class CacheSetting:
    """Parts and modes of one cache. `store_for(n)`: the cold store for pages of n bytes. `near`: the process that owns
    the pages and scores near them, if the policy asks for one. `audit`: also measures the true mass of attended pages,
    at the price of all keys in memory. `exact_now`: steps of one token are exact in any policy. `drafting`: those of a
    VERIFIED policy are sparse, since they are checked."""

    policy: Policy
    budget: HotBudget
    ledger: Ledger
    fetcher: Fetcher
    store_for: Callable[[int], PageStore] = field(repr=False)
    near: NearProcess | None = field(default=None, repr=False)
    profile: Profile | None = None
    audit: bool = False
    exact_now: bool = False
    drafting: bool = False
    first: int = 0
    """The number of the first tiered layer: passes are counted there."""
    approximate: bool = False
    """Parts of the cache differ from full attention's: pages in a lossy codec alone, or tokens of sparse steps that
    were not checked."""

    @property
    def sparse_now(self) -> bool:
        """Whether steps of one token attend over what the policy selects."""
        mode = self.policy.mode
        sparse = mode is AttentionMode.SPARSE or (mode is AttentionMode.VERIFIED and self.drafting)
        return sparse and not self.exact_now

    @property
    def late_pages(self) -> int:
        """Pages of a lane that may be on their way between steps: a part of the pool's room, so that the hot budget
        holds. 0: every step waits for its selected pages."""
        puts_off = self.policy.late_mass is not None and self.fetcher.beside
        return self.budget.pool // _LATE_SHARE if puts_off else 0

    @property
    def slots(self) -> int:
        """Slots of the pool in each lane."""
        return self.budget.pool - self.late_pages
