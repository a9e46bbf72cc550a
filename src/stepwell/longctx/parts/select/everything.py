"""Every page: full attention, and the upper control of every comparison."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepwell.longctx.parts.select.base import Candidates, Selection
from stepwell.longctx.parts.select.choose import marked


@dataclass(frozen=True, slots=True)
class All:
    """Selects all pages that may be selected."""

    def select(self, candidates: Candidates) -> Selection:
        return marked(candidates.score > -torch.inf)
