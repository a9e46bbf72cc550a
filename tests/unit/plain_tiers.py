"""Models of tiers with a policy, too plain to be wrong: single blocks in lists, everything counted anew each time."""

from __future__ import annotations

import math
from collections.abc import Sequence


def leading(path: Sequence[int], held: Sequence[int] | set[int]) -> int:
    return next((at for at, block in enumerate(path) if block not in held), len(path))


class PlainTier:
    """Of the blocks that are held and have no held block behind them, one is chosen and goes; not that which what comes
    stands behind. LRU, as long as nothing is overridden."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: list[int] = []
        self.parents: dict[int, int | None] = {}
        self.times: dict[int, list[float]] = {}  # of all uses
        self.pinned: int | None = None  # while room is made
        self.entered = 0

    def request(self, now: float, path: Sequence[int]) -> int:
        hit = leading(path, self.held)
        for at in reversed(range(len(path))):
            block = path[at]
            self.parents[block] = path[at - 1] if at else None
            self.times.setdefault(block, []).append(now)
            self.refer(block)
        for block in path[hit:]:
            parent = self.parents[block]
            if not self.admits(block) or not self._room(parent):
                self._offer(parent)
                break
            self.held.append(block)
            self.entered += 1
            self.enter(block)
        self._offer(next((block for block in reversed(path) if block in self.held), None))
        return hit

    def tails(self, pinned: int | None = None) -> list[int]:
        return [one for one in self.held if one != pinned and one not in [self.parents[other] for other in self.held]]

    def _room(self, pinned: int | None) -> bool:
        self.pinned = pinned
        while len(self.held) >= self.capacity:
            tails = self.tails(pinned)
            if not tails:
                return False
            victim = self.choose(tails)
            self.held.remove(victim)
            self.leave(victim)
            parent = self.parents[victim]
            if parent in self.tails(pinned):
                self._offer(parent)
        return True

    def _offer(self, block: int | None) -> None:
        if block is not None and block in self.tails():
            self.offer(block)

    def last(self, block: int) -> float:
        return self.times[block][-1]

    def admits(self, block: int) -> bool:
        return True

    def choose(self, tails: list[int]) -> int:
        return min(tails, key=self.last)

    def refer(self, block: int) -> None: ...

    def enter(self, block: int) -> None: ...

    def leave(self, block: int) -> None: ...

    def offer(self, block: int) -> None: ...


class PlainSecondTouch(PlainTier):
    def admits(self, block: int) -> bool:
        return len(self.times[block]) > 1


class PlainLru2(PlainTier):
    def choose(self, tails: list[int]) -> int:
        return min(tails, key=lambda block: ([-math.inf, *self.times[block]][-2], self.last(block)))


class PlainLfu(PlainTier):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.age = 0.0
        self.ranks: dict[int, float] = {}

    def refer(self, block: int) -> None:
        self.ranks[block] = self.age + len(self.times[block])

    def choose(self, tails: list[int]) -> int:
        return min(tails, key=lambda block: (self.ranks[block], self.last(block)))

    def leave(self, block: int) -> None:
        self.age = max(self.age, self.ranks[block])


class PlainSieve(PlainTier):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.visited: set[int] = set()
        self.hand = 0  # place in `queue`, which is by the order of coming
        self.queue: list[int] = []

    def refer(self, block: int) -> None:
        if block in self.queue:
            self.visited.add(block)

    def enter(self, block: int) -> None:
        self.queue.append(block)

    def choose(self, tails: list[int]) -> int:
        while True:
            self.hand %= len(self.queue)
            block = self.queue[self.hand]
            if block in tails and block not in self.visited:
                return block
            if block in tails:
                self.visited.discard(block)
            self.hand += 1

    def leave(self, block: int) -> None:
        del self.queue[self.hand]
        if not any(self.queue.index(tail) >= self.hand for tail in self.tails(self.pinned)):
            self.hand = 0


class PlainS3Fifo(PlainTier):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.small: list[int] = []
        self.main: list[int] = []
        self.aside: dict[int, list[int]] = {}  # and from where
        self.ghosts: list[int] = []
        self.uses: dict[int, int] = {}

    def refer(self, block: int) -> None:
        self.uses[block] = min(3, self.uses.get(block, 0) + 1)

    def enter(self, block: int) -> None:
        self.uses[block] = 0
        if block in self.ghosts:
            self.ghosts.remove(block)
            self.main.append(block)
        else:
            self.small.append(block)
        while len(self.ghosts) > 0.9 * len(self.held):
            del self.ghosts[0]

    def choose(self, tails: list[int]) -> int:
        queues = [self.small, self.main] if len(self.small) > 0.1 * len(self.held) else [self.main, self.small]
        for queue in (*queues, self.main):
            while queue:
                block = queue[0]
                if self.uses[block] > (1 if queue is self.small else 0):
                    self.uses[block] = self.uses[block] - 1 if queue is self.main else 0
                    self.main.append(queue.pop(0))
                elif block in tails:
                    return block
                else:
                    self.aside[queue.pop(0)] = queue
        raise AssertionError

    def leave(self, block: int) -> None:
        if block in self.small:
            self.ghosts.append(block)
            self.small.remove(block)
        else:
            self.main.remove(block)

    def offer(self, block: int) -> None:
        if block in self.aside:
            self.aside.pop(block).insert(0, block)


class PlainArc(PlainTier):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.often: set[int] = set()  # of those held, or remembered
        self.ghosts_once: list[int] = []
        self.ghosts_often: list[int] = []
        self.target = 0.0

    def _once(self) -> list[int]:
        return [block for block in self.held if block not in self.often]

    def refer(self, block: int) -> None:
        once, often = len(self.ghosts_once), len(self.ghosts_often)
        if block in self.held:
            self.often.add(block)
        elif block in self.ghosts_once:
            self.target = min(len(self.held), self.target + max(1, often / once))
            self.ghosts_once.remove(block)
            self.often.add(block)
        elif block in self.ghosts_often:
            self.target = max(0, self.target - max(1, once / often))
            self.ghosts_often.remove(block)

    def enter(self, block: int) -> None:
        once = self._once()
        while len(self.ghosts_once) > len(self.held) - len(once):
            del self.ghosts_once[0]
        while len(self.ghosts_often) > max(0, len(self.held) - len(self.ghosts_once)):
            self.often.remove(self.ghosts_often.pop(0))

    def choose(self, tails: list[int]) -> int:
        once = self._once()
        wanted = once if len(once) > self.target else self.often
        return min([tail for tail in tails if tail in wanted] or tails, key=self.last)

    def leave(self, block: int) -> None:
        (self.ghosts_often if block in self.often else self.ghosts_once).append(block)
