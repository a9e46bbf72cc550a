"""What a policy sees of what a tier holds."""

from __future__ import annotations

from typing import Any, Protocol


class Item(Protocol):
    """A block, or consecutive blocks of one prefix that share one history. Its owner is whoever holds blocks: the arena
    of a well, the replay of a simulator.

    The owner keeps all fields but the last two:

    - size: blocks in it.
    - seconds: prefill seconds that a hit of all of it saves.
    - uses: how often it was asked for, as far as that is remembered; 1 after the first time.
    - used: when that was last; in seconds, strictly increasing from one request to the next.
    - evictable: held, not in use, and no block behind it is held: so tails leave before heads, and what is held of a
      prefix is always usable from its start.

    A policy's own:

    - note: None at first. After a split both parts have the same.
    - listed: 0 at first, and for the tail of a split.
    """

    size: int
    seconds: float
    uses: int
    used: float
    note: Any
    listed: int

    @property
    def evictable(self) -> bool: ...
