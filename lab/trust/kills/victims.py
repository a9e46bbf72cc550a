"""Engines that are to be killed: in the middle of copies, as zombies, which still copy when their link is gone, and at
a system call of a fixed little work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from lab.trust.kills.engine import Chain, Engine

BLOCKS = 16
ONCE = 4
"""Chains of an engine that works once."""

_PAUSE_S = 0.0005
_GARBAGE = 0xEE


def run(order: dict[str, Any], ready: Callable[[], None]) -> None:
    """Goes on until it is killed, or has done its work once. `ready` is called when it has begun to do what
    `order["how"]` says, with chains of BLOCKS blocks from `order["first"]` on; not by one that works once."""
    with Engine(Path(order["home"]), order["model"], order["shard_bytes"], lambda: time.sleep(_PAUSE_S)) as engine:
        engine.join()
        HOW[order["how"]](engine, order["first"], ready)


def _copy(engine: Engine, first: int, ready: Callable[[], None]) -> None:
    """Spills and recalls, slowly."""
    ready()
    for number in count(first):
        engine.spill(Chain(number, BLOCKS))
        engine.recall(Chain(number, BLOCKS))


def _haunt(engine: Engine, first: int, ready: Callable[[], None]) -> None:
    """Drops its links and goes on writing into the slots that it was to fill."""
    with engine.worker.copying() as hold:
        while not (spill := engine.lease(Chain(first, BLOCKS))) or not (slots := engine.slots(hold, spill)):
            time.sleep(_PAUSE_S)
        engine.close()
        ready()
        while True:
            for _, _, slot in slots:
                slot[:] = _GARBAGE
            time.sleep(_PAUSE_S)


def _once(engine: Engine, first: int, ready: Callable[[], None]) -> None:
    """The same calls each time, as far as that can be; what it copies it copies slowly."""
    for number in range(first, first + ONCE):
        engine.spill(Chain(number, BLOCKS))
        engine.recall(Chain(number, BLOCKS))


HOW = {"copy": _copy, "haunt": _haunt, "once": _once}
