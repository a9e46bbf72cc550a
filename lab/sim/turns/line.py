"""A tier that is read for several requests, one batch after the other, in an order that a policy decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stepwell.policies.turns import RequestTurn, Turns

BATCH = 8 << 20


@dataclass(slots=True)
class Recall:
    """It comes at `at` and wants `nbytes`. `number`: its place in the engine's queue."""

    number: int
    at: float
    nbytes: int
    left: int = field(init=False)
    turn: int = 0

    def __post_init__(self) -> None:
        self.left = self.nbytes


class ServiceOrder(Protocol):
    def came(self, recall: Recall) -> None: ...
    def place(self, recall: Recall) -> float: ...
    def served(self, recall: Recall, nbytes: int) -> None: ...


class Queue:
    """The order of the engine's queue."""

    def came(self, recall: Recall) -> None:
        pass

    def place(self, recall: Recall) -> float:
        return recall.number

    def served(self, recall: Recall, nbytes: int) -> None:
        pass


class RoundRobin(Queue):
    """A batch for each in turn."""

    _turn = 0

    def came(self, recall: Recall) -> None:
        recall.turn = self._turn

    def place(self, recall: Recall) -> float:
        return recall.turn

    def served(self, recall: Recall, nbytes: int) -> None:
        self._turn = recall.turn = self._turn + 1


class Shortest(Queue):
    """The shortest remaining first."""

    def place(self, recall: Recall) -> float:
        return recall.left


class WithinK(Queue):
    """Each has as long as `K` times its bytes take alone."""

    K = 4

    def __init__(self) -> None:
        self._served = 0
        self._ends: dict[int, int] = {}

    def came(self, recall: Recall) -> None:
        self._ends[recall.number] = self._served + self.K * recall.nbytes

    def served(self, recall: Recall, nbytes: int) -> None:
        self._served += nbytes


class ShortestWithinK(WithinK):
    """The shortest remaining first, but before all others those whose time is up."""

    def place(self, recall: Recall) -> float:
        return recall.left if self._served < self._ends[recall.number] else recall.number - 1e9


class Deadline(WithinK):
    """The one whose time is up first."""

    def place(self, recall: Recall) -> float:
        return self._ends[recall.number]


class ByTurns(Queue):
    """The product's."""

    def __init__(self) -> None:
        self._turns = Turns()
        self._of: dict[int, RequestTurn] = {}

    def came(self, recall: Recall) -> None:
        self._of[recall.number] = turn = self._turns.join(recall.number)
        self._turns.wants(turn, recall.nbytes)

    def place(self, recall: Recall) -> float:
        return self._of[recall.number].end

    def served(self, recall: Recall, nbytes: int) -> None:
        self._turns.served(self._of[recall.number], nbytes)


ORDERS: dict[str, type[Queue]] = {
    "queue": Queue,
    "round robin": RoundRobin,
    "shortest": Shortest,
    "shortest, k=4": ShortestWithinK,
    "deadline, k=4": Deadline,
    "turns": ByTurns,
}


def waits(
    arrivals: Sequence[tuple[float, int]], order: ServiceOrder, byte_s: float, ahead: int = 0, room: float = np.inf
) -> NDArray[np.float64]:
    """Seconds from each recall's arrival, (seconds, bytes), to its last byte. The tier is asked for `ahead` bytes more
    than it is reading. `room`: bytes of the recalls that are in line at a time, the first of the engine's queue; one at
    least."""
    coming = [Recall(i, at, nbytes) for i, (at, nbytes) in enumerate(arrivals)]
    took = np.zeros(len(coming))
    waiting: list[Recall] = []
    came, now, busy_until = 0, 0.0, 0.0
    while came < len(coming) or waiting:
        now = max(now, busy_until - ahead * byte_s)
        if not waiting:
            now = max(now, coming[came].at)
        while came < len(coming) and coming[came].at <= now:
            waiting.append(coming[came])
            order.came(coming[came])
            came += 1
        line = waiting
        if room < np.inf:
            ends = np.cumsum([recall.nbytes for recall in waiting])
            line = waiting[: max(1, int(np.searchsorted(ends, room, side="right")))]
        recall = min(line, key=lambda recall: (order.place(recall), recall.number))
        nbytes = min(BATCH, recall.left)
        busy_until = max(now, busy_until) + nbytes * byte_s
        recall.left -= nbytes
        order.served(recall, nbytes)
        if not recall.left:
            took[recall.number] = busy_until - recall.at
            waiting.remove(recall)
    return took
