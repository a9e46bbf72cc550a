"""A policy: which parts the machine is put together from, as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from stepwell.errors import ConfigError
from stepwell.longctx.parts.codec.base import CodecKind
from stepwell.longctx.parts.index.base import IndexKind
from stepwell.longctx.parts.residency.base import ResidencyKind
from stepwell.longctx.parts.select.base import Selector


class AttentionMode(Enum):
    EXACT = "exact"
    """Every step attends over all pages: equal to full attention up to rounding."""
    VERIFIED = "verified"
    """Tokens are drafted with the sparse parts and checked in exact passes: the greedy tokens of full attention."""
    SPARSE = "sparse"
    """Steps attend over hot tokens and the pages that the selector chose."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy of a cache.

    `index`, `selector`: None in EXACT only. `codec`: of cold pages; None is lossless. The first `sinks` and the last
    `window` tokens are always hot (`window` None: the whole hot budget is the most recent tokens, and fetched pages are
    not kept).

    `query`: the query that scores pages. "ahead": predicted from the layer before (ScoutAttention); with `prefetch` a
    prediction only fetches early. Attention always uses the actual query, unless `predicted_math`. `lookahead`: layers
    between a prediction and its layer; a larger number gives a fetch more time, and a less exact prediction.

    `executor`: "fetch" copies pages to the model's device; "in_place" attends over them where they lie, on the CPU, and
    returns only partial results; "near_data" is "fetch" with pages and index in a process of their own, which returns
    the scores of the best pages only (HillInfer). `candidates`: their share of the context; None: the most that the
    selector takes, by its `share` or `ceiling`. Other pages have no order.

    `attend_hot`: pages that happen to be hot are attended over, selected or not: that costs no transfer. `new_pages`:
    most pages that are fetched in a step and layer. `late_mass`: a step waits for pages that were not predicted if they
    are estimated to hold more than this share of a head's attention; of the others as many as fit into a quarter of the
    pool's room are fetched for the next step (None: it waits for all; so does a step whose rows are not those of the
    step before, as with beams). `profile_steps`: steps after which the pool's slots are divided anew among the layers,
    by what each gains there. `draft_tokens`: most tokens that are drafted between two checks. `alarm`: the estimated
    share of attention left out, averaged over 32 steps, above which accuracy is at risk.
    """

    name: str
    mode: AttentionMode = AttentionMode.SPARSE
    index: IndexKind | None = None
    selector: Selector | None = None
    residency: ResidencyKind | None = None
    codec: CodecKind | None = None
    page_tokens: int = 16
    joint: bool = True
    sinks: int = 4
    window: int | None = 64
    query: Literal["actual", "ahead", "previous"] = "actual"
    prefetch: bool = False
    executor: Literal["fetch", "in_place", "near_data"] = "fetch"
    candidates: float | None = None
    predicted_math: bool = False
    attend_hot: bool = True
    new_pages: int | None = None
    lookahead: int = 1
    late_mass: float | None = None
    profile_steps: int | None = None
    draft_tokens: int = 16
    alarm: float = 0.2

    def __post_init__(self) -> None:
        if self.mode is not AttentionMode.EXACT and (self.index is None or self.selector is None):
            raise self._impossible("it has no index or no selector", "name both, or use mode EXACT")
        if self.mode is AttentionMode.EXACT and self.codec is not None:
            raise self._impossible("an exact policy keeps pages lossless", "leave `codec` out")
        if self.executor not in ("fetch", "in_place", "near_data"):
            raise self._impossible("executor is 'fetch', 'in_place' or 'near_data'", "name one of these")
        if self.executor == "near_data" and self.index is None:
            raise self._impossible("without an index nothing is scored near the data", "use executor='fetch'")
        if self.candidates is not None and not 0.0 < self.candidates <= 1.0:
            raise self._impossible("candidates is a share of the context: above 0, at most 1", "change it")
        if self.page_tokens < 1 or self.sinks < 0 or (self.window is not None and self.window < 1):
            raise self._impossible("page_tokens and window are at least 1, sinks at least 0", "change them")
        if self.lookahead < 1 or not 0.0 <= (self.late_mass or 0.0) <= 1.0:
            raise self._impossible("lookahead is at least 1, late_mass a share of attention", "change them")
        if not 1 <= self.draft_tokens <= 64:
            raise self._impossible("draft_tokens lies between 1 and 64", "change it")
        if self.prefetch and self.executor == "in_place":
            raise self._impossible("pages that are attended over where they lie are not fetched early", "leave one out")
        if self.predicted_math and (self.query != "ahead" or self.executor != "in_place"):
            raise self._impossible("predicted_math needs query='ahead' and executor='in_place'", "set both")

    @property
    def scored_share(self) -> float:
        """Share of the context whose scores the process near the data returns."""
        if self.candidates is not None:
            return self.candidates
        most: float = getattr(self.selector, "share", getattr(self.selector, "ceiling", 1.0))
        return most

    def _impossible(self, why: str, fix: str) -> ConfigError:
        return ConfigError("SW-129", what=f"the policy {self.name!r} is impossible", why=why, fix=fix)
