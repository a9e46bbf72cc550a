"""Items of a tier as policies see them."""

from __future__ import annotations

from typing import Any, Protocol


class Item(Protocol):
    """A block, or consecutive blocks of one prefix that share one history. Its owner holds the blocks: the arena of a
    well, or the replay of a simulator. The owner keeps all fields but the last two:

    - size: number of blocks.
    - seconds: prefill seconds that a hit of all of it saves.
    - uses: number of requests for it, as far as remembered; 1 after the first.
    - used: time of the last of them, in seconds; strictly increasing from one request to the next.
    - evictable: held, not in use, and no block behind it is held: so tails leave before heads, and the part of a prefix
      that is held can always be used from its start.

    Fields of the policy:

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
