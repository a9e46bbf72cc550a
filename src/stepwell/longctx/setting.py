"""What the layers of one cache share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from stepwell.longctx.budget import HotBudget
from stepwell.longctx.fetcher import Fetcher
from stepwell.longctx.ledger import Ledger
from stepwell.longctx.near.process import NearProcess
from stepwell.longctx.policy import Policy
from stepwell.longctx.profile import Profile
from stepwell.longctx.store.base import PageStore


@dataclass(slots=True)
class Setting:
    """`store_for`: the cold store for pages of so many bytes. `near`: the process that owns these and scores near them,
    where the policy says so. `audit`: the true mass of what was attended is noted
    beside the estimated one, at the price of all keys in memory. `exact_now`: steps of one token are exact, too."""

    policy: Policy
    budget: HotBudget
    ledger: Ledger
    fetcher: Fetcher
    store_for: Callable[[int], PageStore] = field(repr=False)
    near: NearProcess | None = field(default=None, repr=False)
    profile: Profile | None = None
    audit: bool = False
    exact_now: bool = False
