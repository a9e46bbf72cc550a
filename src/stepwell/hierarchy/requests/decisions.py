"""The last decisions to recall or to recompute, with how they went, for who asks why."""

from __future__ import annotations

from collections import OrderedDict

from stepwell.events import Event, RecallDecided, RecallEnded

KEPT = 256


class DecisionLog:
    """A sink of events that keeps the last KEPT decisions."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, tuple[RecallDecided, RecallEnded | None]] = OrderedDict()

    def __call__(self, event: Event) -> None:
        match event:
            case RecallDecided(number):
                self._kept[number] = event, None
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            case RecallEnded(number) if number in self._kept:
                self._kept[number] = self._kept[number][0], event
            case _:
                pass

    def latest(self, most: int) -> list[tuple[RecallDecided, RecallEnded | None]]:
        """The latest first."""
        return list(self._kept.values())[::-1][: max(most, 0)]
