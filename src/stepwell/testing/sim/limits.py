"""How long a request may be told to wait, said again, apart from the client that decides it (docs/design/adr/0009)."""

from __future__ import annotations

from stepwell.client.scheduler import Ask
from stepwell.testing.sim.engine import Engine
from stepwell.testing.sim.oracle import Violation

NOTHING_MOVED_S = 0.05 + 0.25
"""No block has come for any request of this engine, nor were any given back, though a read may take its time."""

NOTHING_SAID_S = 0.05 + 0.1
"""The well has not said a word about this request."""

ALTOGETHER_S = 2.0
"""Since the request came to be asked about, or since one of the same engine last had all that it asked for."""


def still_in_time(engine: Engine, ask: Ask, now: float) -> None:
    """The request was told to wait at this moment. Raises Violation if it should not have been."""
    waited = now - ask.first_poll
    idle = now - max(ask.first_poll, engine.progress, engine.turn)
    late = ""
    if not ask.answered and waited >= NOTHING_SAID_S:
        late = f"unanswered after {waited:.3f} s"
    elif idle >= NOTHING_MOVED_S:
        late = f"nothing moved for {idle:.3f} s ({ask.reason})"
    elif now - max(ask.first_poll, engine.turn) >= ALTOGETHER_S:
        late = f"waits for {waited:.3f} s ({ask.reason})"
    if late:
        raise Violation("late", f"request {ask.ticket} of engine {engine.number}: {late}")
