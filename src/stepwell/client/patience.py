"""How long a request may wait for its recall: two limits, no deadline guessed in advance."""

from __future__ import annotations

from dataclasses import dataclass

from stepwell.protocol.messages import MAX_ALLOWED_S

STALL_S = 0.05
"""No block has landed for this long (plus what the well allows, where there is a tier below)."""

UNANSWERED_S = 0.1
"""The same for a well that has not said anything about a request yet: on a busy machine it may wait for a processor.
In addition to STALL_S, and once: while it stays silent, the next request does not wait for this."""

TOTAL_S = 2.0
"""Altogether, until the well knows how long computing takes; then as long as that."""

MAX_LIMIT_S = 60.0
"""However long the well says, and however many wait before it."""


def cap(total_s: float, sharing: int) -> float:
    """Seconds after which nothing keeps a request waiting that shares the line with so many: its total limit once for
    each of them and for itself, at most a minute."""
    return min((1 + sharing) * total_s, MAX_LIMIT_S)


@dataclass(frozen=True, slots=True)
class Patience:
    """The clock of both limits starts at the scheduler's first ask, in seconds of one monotonic clock. `reading_s`: how
    much longer than `stall_s` a request is kept waiting that has been told that its blocks are read, or, once in a
    silence of the well, that has been told nothing. `block_s`: how much longer than `total_s` for each of these blocks.
    Both are for engines of which the well does not know how long computing takes."""

    stall_s: float = STALL_S
    total_s: float = TOTAL_S
    reading_s: float = 0.0
    block_s: float = 0.0

    def over(
        self,
        first_ask: float,
        last_news: float,
        now: float,
        allow_s: float = 0.0,
        limit_s: float = 0.0,
        *,
        reading: bool = False,
        turn: float = 0.0,
    ) -> bool:
        """True when waiting must end: what has landed is offered, the rest is recomputed. `allow_s`: what the well says
        that a block from a tier may take in addition, at most 250 ms. `limit_s`: what it says that all of it is worth
        waiting for, since the first ask or since `turn`. `reading`: it has said that blocks are read, or may say so
        yet."""
        stall_s = self.stall_s + (self.reading_s if reading else 0.0) + min(max(allow_s, 0.0), MAX_ALLOWED_S)
        return now - max(first_ask, last_news) >= stall_s or now - max(first_ask, turn) >= self.total(limit_s)

    def total(self, limit_s: float, blocks: int = 0) -> float:
        """Seconds that a recall of so many blocks may take which the well says is worth `limit_s`; 0: it does not know.
        `cap` bounds what it says."""
        return limit_s if limit_s > 0 else self.total_s + blocks * self.block_s


PATIENCE = Patience()
