"""Streamed recalls: each rank copies blocks as they land, in pieces, at its own pace, until it has all that were to
come or gives up, at a limit or by whim."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lab.sim.engine import Copy, Engine, Phase, Request, StreamCopy
from lab.sim.oracle import Violation
from stepwell.protocol.messages import LineMoved

if TYPE_CHECKING:
    from lab.sim.world import World

SLOW, GIVES_UP, SILENT, FEWER = 0.15, 0.004, 0.1, 0.1
"""How often a rank is slow, gives up when it comes to a stream, says nothing of a piece; and an engine takes less than
was offered."""


class Streams:
    def __init__(self, world: World) -> None:
        self._world = world

    def begin(self, engine: Engine, request: Request) -> None:
        """The engine has room for what was offered, or for a part of it."""
        world, ask = self._world, request.ask
        assert ask is not None
        if world.whims and world.dice.random() < FEWER:
            request.offered = world.dice.randint(request.first + 1, request.offered)
        blocks = request.offered - request.first
        transfer, limits = engine.scheduler.stream(ask, request.first, blocks)
        request.phase, request.good = Phase.COPYING, blocks
        request.missing = set(range(engine.model.world))
        for rank, each in enumerate(engine.workers):
            wait, slow = engine.queue.streams(ask), world.dice.random() < SLOW
            shard = rank // engine.model.replicas
            each.copies.append(
                StreamCopy(each, rank, shard, ask.session, request, transfer, blocks, limits, wait, slow)
            )
        world.seen["streams"] += 1

    def heard(self, process: int, concerns: Callable[[StreamCopy], bool], moved: LineMoved | None = None) -> None:
        """The well has said something to this process that concerns such streams, perhaps that the line moves."""
        now = self._world.clock.now()
        for engine in self._world.engines:
            if process // 10 == engine.number:
                worker = process % 10 - 1
                for copy in engine.workers[worker].copies if worker >= 0 else ():
                    if isinstance(copy, StreamCopy):
                        copy.wait.news = now if concerns(copy) else copy.wait.news
                        copy.wait.others = max(copy.wait.others, moved.sharing - 1 if moved else 0)
                        copy.wait.turn = now if moved and moved.whole else copy.wait.turn

    def go_on(self, engine: Engine, copy: StreamCopy) -> bool:
        """A rank comes to its stream. False: it waits."""
        world, now = self._world, self._world.clock.now()
        ahead = [other for other in copy.worker.copies if isinstance(other, StreamCopy)][: engine.lanes]
        if copy not in ahead:
            return False
        if copy.stream is None:
            copy.stream = copy.worker.stream(copy.session, copy.transfer, copy.limits)
            copy.wait.began = now
            return True
        if copy.copying:
            return False
        if world.whims and copy.slow and world.dice.random() < 0.9:
            return True
        if world.whims and world.dice.random() < GIVES_UP:
            return self._end(engine, copy, "by whim")
        over, refs = copy.stream.over, copy.stream.next(0.0)
        if refs is not None:
            if copy.good + len(refs) > copy.blocks:
                raise Violation("books", f"{copy.good + len(refs)} blocks of a stream have landed, of {copy.blocks}")
            piece = Copy(copy.worker, copy.rank, copy.shard, copy.session, refs[:, copy.shard], [], [], copy.request,
                         [copy.transfer], copy)  # fmt: skip
            copy.worker.copies.append(piece)
            copy.copying = True
            return True
        if copy.good == copy.blocks or over:
            return self._end(engine, copy, over if copy.good < copy.blocks else "all")
        copy.wait.still_in_time(now)
        return False

    def copied(self, engine: Engine, piece: Copy, good: int) -> None:
        """A piece was copied, and so many leading blocks of it are what was leased."""
        copy = piece.stream
        assert copy is not None
        copy.copying = False
        copy.buffers += piece.buffers[:good]
        copy.good += good
        if good < len(piece.refs):
            copy.request.failed = True
            self._end(engine, copy, "failed")
        elif not self._world.whims or self._world.dice.random() >= SILENT:
            copy.worker.copied(copy.session, copy.transfer, copy.good)

    def _end(self, engine: Engine, copy: StreamCopy, why: str) -> bool:
        request = copy.request
        assert request.ask is not None
        copy.end()
        request.good = min(request.good, copy.good)
        request.got[copy.rank] = copy.buffers
        request.ended[why] += 1
        request.missing.discard(copy.rank)
        copy.worker.recalled(copy.session, [copy.transfer])
        if not request.missing and request.phase is Phase.COPYING:
            engine.scheduler.stream_ended(copy.transfer)
            engine.queue.ended(request.ask, self._world.clock.now())
            for why in request.ended:
                self._world.seen[f"stream: {why}"] += 1
            self._world.copies.recalled(engine, request)
        return True
