"""The well's one thread: what is ready, what has ended, and a slice of the state machine's work, in short turns.

Plain `selectors`, because descriptors are passed and microseconds count. Every call into the hierarchy comes from
here or from the server, on this thread, and none from inside another one.
"""

from __future__ import annotations

import gc
import selectors
from collections.abc import Sequence
from dataclasses import dataclass

from stepwell.hierarchy.hierarchy import Hierarchy
from stepwell.io.clock import Clock
from stepwell.io.process.dumps import clear_registers
from stepwell.protocol.messages import Refused
from stepwell.serve.executor import ThreadExecutor, Wakeup
from stepwell.serve.server.admin import Answer, Shell
from stepwell.serve.server.gates import Gate
from stepwell.serve.server.server import Server

GRACE_SECONDS = 5.0
"""A new well waits at least this long for the engine that started it."""

_SLICE_SECONDS = 0.0001  # of a round, for what can also wait for the next one
_GC_IDLE, _GC_BUSY, _GC_AFTER_SECONDS = 500, 5000, 0.25  # 5000 young objects are looked through in about 0.3 ms


@dataclass(frozen=True, slots=True)
class Linger:
    """Seconds that a well without sessions stays: `blocks` while it holds blocks, `empty` while it does not."""

    blocks: float
    empty: float


def _no_settings(answer: Answer) -> None:
    answer(Refused("SW-103", "the settings cannot be read again", "this well was started without any", "restart it"))


BARE = Shell(kept=lambda: True, reload=_no_settings)
"""The shell of a loop without a process of its own around it."""


class Loop:
    """Serves `gates`, which are closed when `run` returns. Without `linger` only `stop` ends it."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        gates: Sequence[Gate],
        clock: Clock,
        executors: Sequence[ThreadExecutor],
        wakeup: Wakeup,
        *,
        linger: Linger | None = None,
        shell: Shell = BARE,
    ) -> None:
        self._hierarchy = hierarchy
        self._clock = clock
        self._executors = executors
        self._wakeup = wakeup
        self.linger = linger
        self._shell = shell
        self._why = ""
        self._reload = False
        self._idle_since: float | None = clock.now() + GRACE_SECONDS
        self._selector = selectors.DefaultSelector()
        self._selector.register(wakeup, selectors.EVENT_READ, self._woken)
        self._server = Server(hierarchy, gates, self._selector, clock, self.stop, shell)

    def stop(self, why: str) -> None:
        """Ends `run` after the current round. For the loop's own thread and for signal handlers."""
        self._why = self._why or why

    def reload(self) -> None:
        """Asks for the settings to be read again in the next round. For signal handlers."""
        self._reload = True

    def run(self) -> str:
        """Serves until it is stopped or no engine needs it, and returns why. Python's own garbage collection is off
        meanwhile: the loop collects."""
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            more = False
            while not self._why:
                if not more:
                    clear_registers()
                events = self._selector.select(0 if more else self._patience())
                more = self._round(events)
                self._collect(idle=not events and not more)
            return self._why
        finally:
            self._server.close()
            self._selector.close()
            if was_enabled:
                gc.enable()

    def drain(self, seconds: float) -> bool:
        """After `run`: lets what waits to be written be written. False: not all of it was, in that time."""
        drained = False

        def done() -> None:
            nonlocal drained
            drained = True

        deadline = self._clock.now() + seconds
        self._hierarchy.drain(done)
        while not drained and (left := deadline - self._clock.now()) > 0:
            more = self._complete(deadline)
            if not self._hierarchy.turn() and not more and not drained:
                due = self._hierarchy.next_moment
                self._wakeup.wait(left if due is None else min(left, max(0.0, due - self._clock.now())))
        return drained

    def _complete(self, until: float) -> bool:
        more = False
        for executor in self._executors:
            more |= executor.complete(self._clock, until)
        return more

    def _round(self, events: list[tuple[selectors.SelectorKey, int]]) -> bool:
        """One turn over everything that is ready. True: there is more to do at once."""
        until = self._server.until = self._clock.now() + _SLICE_SECONDS
        if self._reload:
            self._reload = False
            self._shell.reload(lambda message: None)
        for key, mask in events:
            key.data(mask)
        self._server.handle_unread()
        self._server.end_severed()
        self._server.keep_time(self._clock.now())
        self._keep_lingering(self._clock.now())
        more = self._complete(until)
        self._shell.keep_time(self._clock.now())
        more = self._hierarchy.turn() or more
        self._server.send_all()
        return more or self._server.busy

    def _patience(self) -> float | None:
        """Seconds until time alone gives us something to do; None: never."""
        every = (self._server.next_moment(), self._leaves_at(), self._hierarchy.next_moment, self._shell.next_moment())
        moments = [moment for moment in every if moment is not None]
        if gc.get_count()[0] > _GC_IDLE:
            moments.append(self._clock.now() + _GC_AFTER_SECONDS)
        return max(0.0, min(moments) - self._clock.now()) if moments else None

    def _keep_lingering(self, now: float) -> None:
        if self._hierarchy.sessions:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        leaves_at = self._leaves_at()
        if leaves_at is not None and now >= leaves_at:
            self.stop("no engine has used it for a while")

    def _leaves_at(self) -> float | None:
        if self.linger is None or self._idle_since is None:
            return None
        return self._idle_since + (self.linger.blocks if self._hierarchy.holds_blocks else self.linger.empty)

    def _collect(self, *, idle: bool) -> None:
        # Only the youngest generation: the index may be millions of objects, and nothing in it is cyclic garbage.
        if gc.get_count()[0] > (_GC_IDLE if idle else _GC_BUSY):
            gc.collect(0)

    def _woken(self, _: int) -> None:
        self._wakeup.clear()
