"""What was spilled, and whether what comes back is that.

Each fill of a block has a number of its own, and every word of every shard says which fill, shard and word
it is: so bytes that are stale, misplaced, torn or another block's are told apart. Whatever is recalled under an
identity must be, whole, one fill that all who write wrote under exactly that identity, and that was not cleared since.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stepwell.io.memory import Bytes

Identity = tuple[int, int, bytes]
"""Which model, weights epoch, and name: a block's digest, and whatever tells its parts apart."""


class Violation(Exception):
    """A promise does not hold. `promise`: which of PROMISES."""

    def __init__(self, promise: str, what: str) -> None:
        super().__init__(promise, what)
        self.promise = promise
        self.what = what

    def __str__(self) -> str:
        return f"{self.promise}: {self.what}"


PROMISES = ("wrong", "late", "books", "hits", "warm", "paused", "looks")
"""Wrong bytes; a request that waits beyond its limits; books that do not balance, something left over or raised; no
hits although nothing is wrong any more; what was written is not found by the next well; something that is paused goes
on; something is said to be there that never was, or is gone for good."""


@dataclass(slots=True, eq=False)
class Fill:
    """Bytes of one block that ranks write. `sent`: ranks that said so; `landed`: of whom the well knows that.
    `cleared`: after how many events it was forgotten for good."""

    nonce: int
    identity: Identity
    shards: int
    sent: set[int] = field(default_factory=set)
    landed: set[int] = field(default_factory=set)
    dropped: bool = False
    cleared: int | None = None

    @property
    def whole(self) -> bool:
        return len(self.sent) == self.shards and not self.dropped

    @property
    def published(self) -> bool:
        return len(self.landed) == self.shards and not self.dropped


class Oracle:
    """`right`: blocks that came back and were what was spilled."""

    def __init__(self) -> None:
        self.fills: list[Fill] = []
        self.right = 0
        self._whose: dict[Identity, list[Fill]] = {}
        self.seen: Counter[str] = Counter()

    def begin(self, identity: Identity, shards: int) -> Fill:
        fill = Fill(len(self.fills) + 1, identity, shards)  # zeros are nobody's
        self.fills.append(fill)
        self._whose.setdefault(identity, []).append(fill)
        return fill

    def clearing(self, model: int, epoch: int) -> list[Fill]:
        """What a clear of this namespace that begins now must reach; model -1: of all."""
        return [
            fill
            for fill in self.fills
            if fill.published and fill.cleared is None and (model < 0 or fill.identity[:2] == (model, epoch))
        ]

    def judge(self, identity: Identity, shards: Sequence[Bytes], asked: int) -> None:
        """The shards of a block, one by one, as they were recalled by one who asked for them after so many events.
        Raises Violation."""
        words = [shard[: len(shard) // 8 * 8].view(np.uint64) for shard in shards]
        nonce = int(words[0][0]) >> 32
        for shard, found in enumerate(words):
            differs = found != content(nonce, shard, len(found) * 8).view(np.uint64)
            if differs.any():
                at = int(differs.argmax())
                raise Violation(
                    "wrong", f"{_name(identity)} begins as fill {nonce}; shard {shard} differs from word {at} on"
                )
        fill = self.fills[nonce - 1] if 0 < nonce <= len(self.fills) else None
        if fill is None or fill.identity != identity:
            other = _name(fill.identity) if fill is not None else "nothing"
            raise Violation("wrong", f"{_name(identity)} came back as {other} (fill {nonce})")
        if not fill.whole:
            raise Violation("wrong", f"{_name(identity)} came back as fill {nonce}, which was never whole")
        if fill.cleared is not None and fill.cleared < asked:
            raise Violation("wrong", f"{_name(identity)} came back as fill {nonce}, which was cleared")
        self.right += 1

    def judge_look(self, identity: Identity, asked: int) -> None:
        """The well has said that this is there, to one who looked after so many events. Raises Violation if it cannot
        have been."""
        fills = [fill for fill in self._whose.get(identity, ()) if fill.published]
        if not any(fill.cleared is None or fill.cleared >= asked for fill in fills):
            why = "was cleared" if fills else "was never stored"
            raise Violation("looks", f"{_name(identity)} is said to be there, and {why}")


def content(nonce: int, shard: int, nbytes: int) -> Bytes:
    """What is written there: `nbytes` is a multiple of 8."""
    words = np.arange(nbytes // 8, dtype=np.uint64) + np.uint64(nonce << 32 | shard << 24)
    return words.view(np.uint8)


def _name(identity: Identity) -> str:
    model, epoch, digest = identity
    return f"block {digest[:4].hex()} of model {model}, epoch {epoch}"
