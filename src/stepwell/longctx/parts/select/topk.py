"""A fixed share of the context in pages, as Quest, KVDrive, TTKV, ScoutAttention and YAKV select."""

from __future__ import annotations

from dataclasses import dataclass

from stepwell.longctx.parts.figures import require_share
from stepwell.longctx.parts.select.base import Candidates, Selection
from stepwell.longctx.parts.select.choose import best


@dataclass(frozen=True, slots=True)
class TopK:
    """The pages with the greatest score, `share` of the whole context (sinks and window not counted among them)."""

    share: float

    def __post_init__(self) -> None:
        require_share(self.share, self, "share")

    def select(self, candidates: Candidates) -> Selection:
        return best(candidates.score, candidates.pages(self.share))
