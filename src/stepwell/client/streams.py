"""Streamed recalls as a worker sees them: blocks arrive one after the other, for the thread that copies them.

What the well says of a stream may come before the plan that asks for its copy, since the two come by different ways.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from stepwell.client.patience import cap
from stepwell.client.questions import SlotRefs
from stepwell.protocol.messages import MAX_ALLOWED_S, SLOT_REF, Landed, LineMoved

MAX_STREAMS = 4096
"""Streams of which something is kept: no more transfers are under way."""


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How long the blocks of a stream are waited for, in seconds. `stall_s`: without a block of it while it is not said
    that the line moves, and beyond what the well allows for a block, `allow_s` until it says something else. `total_s`:
    since one in line last had all that it asked for, `turn_s` of which have gone; and altogether, once for itself and
    once for each of `sharing` that are in line with it, `waited_s` of which have gone."""

    stall_s: float
    total_s: float
    allow_s: float = 0.0
    sharing: int = 0
    waited_s: float = 0.0
    turn_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Inbox:
    pieces: deque[SlotRefs] = field(default_factory=deque)
    more: bool = True
    reason: str = ""
    allow_s: float | None = None
    sharing: int = 0  # the most others of which the well has said that they are in line
    news: float = 0.0
    turn: float | None = None  # when the well last said that one in line has had all


class Stream:
    """The blocks of one streamed transfer, in order; for one thread. Closed by leaving its `with` block."""

    def __init__(self, streams: Streams, transfer: int, inbox: _Inbox, limits: StreamLimits) -> None:
        self._streams = streams
        self._transfer = transfer
        self._inbox = inbox
        self._limits = limits
        self._began = streams.clock()

    def next(self, wait_s: float) -> SlotRefs | None:
        """Where the shards of the next blocks lie, of shape (blocks, shards); None: none have come in `wait_s`
        seconds."""
        with self._streams.changed:
            if not self._inbox.pieces and wait_s > 0:
                self._streams.changed.wait_for(lambda: self._inbox.pieces or not self._inbox.more, wait_s)
            return self._inbox.pieces.popleft() if self._inbox.pieces else None

    @property
    def waits(self) -> bool:
        """Nothing has come since the last `next`, and it is not over."""
        return not self._inbox.pieces and not self.over

    @property
    def over(self) -> str:
        """Why no more blocks are waited for; "" while they are. Blocks that have come may still be there."""
        inbox = self._inbox
        if not inbox.more:
            return inbox.reason or "gave_way"
        now, allow_s = self._streams.clock(), self._limits.allow_s if inbox.allow_s is None else inbox.allow_s
        stall_s = self._limits.stall_s + min(max(allow_s, 0.0), MAX_ALLOWED_S)
        turn = self._began - self._limits.turn_s if inbox.turn is None else max(inbox.turn, self._began)
        cap_s = cap(self._limits.total_s, max(self._limits.sharing, inbox.sharing)) - self._limits.waited_s
        late = now - max(self._began, inbox.news) >= stall_s or now - turn >= self._limits.total_s
        return "too_slow" if late or now - self._began >= cap_s else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._streams.close(self._transfer)


class Streams:
    """All streams of one worker's present session. `shards`: how many a block has."""

    def __init__(self, shards: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._shards = shards
        self.clock = clock
        self.changed = threading.Condition()
        self._session = 0
        self._inboxes: OrderedDict[int, _Inbox] = OrderedDict()
        self._closed: OrderedDict[int, None] = OrderedDict()

    def joined(self, session: int) -> None:
        """Called by the link's thread: what comes from here on is of this session."""
        with self.changed:
            self._session = session

    def open(self, session: int, transfer: int, limits: StreamLimits) -> Stream:
        """The stream of this transfer, over already if its session is."""
        with self.changed:
            lost = session != self._session
            inbox = _Inbox(more=False, reason="well_lost") if lost else self._inbox(transfer)
            return Stream(self, transfer, inbox, limits)

    def landed(self, message: Landed) -> None:
        """Called by the link's thread."""
        with self.changed:
            if message.transfer in self._closed:
                return
            inbox = self._inbox(message.transfer)
            if message.slots:
                inbox.pieces.append(np.frombuffer(message.slots, SLOT_REF).reshape(-1, self._shards))
            inbox.more, inbox.reason, inbox.allow_s = message.more, message.reason, message.allow_s
            inbox.news = self.clock()
            self.changed.notify_all()

    def moved(self, message: LineMoved) -> None:
        """Called by the link's thread."""
        with self.changed:
            now = self.clock()
            for transfer, inbox in self._inboxes.items():
                inbox.sharing = max(inbox.sharing, message.sharing - 1)
                inbox.turn = now if message.whole else inbox.turn
                inbox.news = now if transfer not in message.apart else inbox.news

    def lost(self) -> None:
        """The session is over: nothing comes any more."""
        with self.changed:
            for inbox in self._inboxes.values():
                inbox.more, inbox.reason = False, "well_lost"
                inbox.pieces.clear()
            self._inboxes.clear()
            self._closed.clear()
            self._session = 0
            self.changed.notify_all()

    def close(self, transfer: int) -> None:
        """What comes for this stream is dropped from here on."""
        with self.changed:
            self._inboxes.pop(transfer, None)
            self._closed[transfer] = None
            if len(self._closed) > MAX_STREAMS:
                self._closed.popitem(last=False)

    def _inbox(self, transfer: int) -> _Inbox:
        inbox = self._inboxes.get(transfer)
        if inbox is None:
            inbox = self._inboxes[transfer] = _Inbox()
            if len(self._inboxes) > MAX_STREAMS:
                self._inboxes.popitem(last=False)
        return inbox
