"""Number of tokens to draft before a check: the one that makes a token cheapest."""

from __future__ import annotations

_MEMORY = 0.9


class DraftLength:
    """If a drafted token agrees with probability p, k drafts and one check give (1 - p^(k+1)) / (1 - p) tokens on
    average (taking agreements as independent) and move k drafts' and one check's bytes. p and both costs are learned as
    running means."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._agreed, self._asked = 0.95 * 16, 16.0
        self._draft, self._check = 1.0, 16.0
        self._known = False

    @property
    def agreement(self) -> float:
        return self._agreed / self._asked

    def best(self) -> int:
        return min(range(1, self._most + 1), key=self._cost)

    def learn(self, drafted: int, accepted: int, draft_cost: float, check_cost: float) -> None:
        """Learns from one round. Costs are in any one unit; if nothing was moved at all, they stay as they were."""
        asked = min(accepted + 1, drafted)
        self._agreed = self._agreed * _MEMORY + accepted
        self._asked = self._asked * _MEMORY + asked
        if check_cost > 0:
            keep = _MEMORY if self._known else 0.0
            self._draft = self._draft * keep + draft_cost * (1 - keep)
            self._check = self._check * keep + check_cost * (1 - keep)
            self._known = True

    def _cost(self, count: int) -> float:
        p = min(self.agreement, 0.999)
        tokens = (1 - p ** (count + 1)) / (1 - p)
        return (self._check + count * self._draft) / tokens
