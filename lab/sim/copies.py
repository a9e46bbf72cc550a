"""Copies of blocks into and out of slots, a part at a time, and what is judged when all of them have ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.sim.engine import Copy, Engine, Phase, Request, empty, halves
from lab.sim.oracle import Violation, content
from stepwell.errors import IntegrityError

if TYPE_CHECKING:
    from lab.sim.world import World


class Copies:
    def __init__(self, world: World) -> None:
        self._world = world

    def go_on(self, engine: Engine, copy: Copy) -> None:
        """A part of a copy: its beginning, a half of its bytes, or its end."""
        if not copy.running:
            copy.begin()
        elif copy.half < 2:
            nbytes = engine.model.shard_bytes
            part = halves(nbytes)[copy.half]
            for at, slot in enumerate(copy.slots):
                if copy.request is None:
                    self._still_theirs(copy, at)
                    slot[part] = content(copy.fills[at].nonce, copy.shard, nbytes)[part]
                else:
                    if copy.stream is not None:
                        self._still_theirs(copy, at)
                    if not copy.half:
                        copy.buffers.append(empty(nbytes))
                    copy.buffers[at][part] = slot[part]
            copy.half += 1
        elif copy.request is None:
            self._copied_out(engine, copy)
        else:
            self._copied_in(engine, copy, copy.request)

    def _still_theirs(self, copy: Copy, at: int) -> None:
        """What a process writes, or copies as a part of a stream, zombie or not, was given to nobody else meanwhile."""
        world = self._world
        if world.life is None or copy.session not in world.sessions:
            return
        number, slot, generation = list(copy.where())[at]
        slab = world.life.hierarchy.slabs.slabs.get(number)
        if slab is None or slab.generation(slot) != generation:
            raise Violation("books", f"slot {slot} of slab {number} was given away while a process copies it")
        world.seen["zombie writes"] += copy.session not in world.life.hierarchy.registry.sessions

    def _copied_out(self, engine: Engine, copy: Copy) -> None:
        written = len(copy.slots)
        if self._world.whims and self._world.dice.random() < 0.05:
            written = self._world.dice.randrange(written + 1)
        copy.end()
        for at, fill in enumerate(copy.fills):
            if at < written:
                fill.sent.add(copy.rank)
            else:
                fill.dropped = True
        copy.worker.filled(copy.session, copy.leases[:written], copy.leases[written:])

    def _copied_in(self, engine: Engine, copy: Copy, request: Request) -> None:
        good = 0
        try:
            for place in list(copy.where())[: len(copy.buffers)]:
                copy.worker.verify(copy.session, *place)
                good += 1
        except IntegrityError:
            self._world.seen["failed loads"] += 1
        copy.end()
        if copy.stream is not None:
            self._world.streams.copied(engine, copy, good)
            return
        request.good = min(request.good, good)
        request.got[copy.rank] = copy.buffers
        request.missing.discard(copy.rank)
        copy.worker.recalled(copy.session, copy.transfers)
        if not request.missing and request.phase is Phase.COPYING:
            request.failed = request.first + request.good < request.offered
            self.recalled(engine, request)

    def recalled(self, engine: Engine, request: Request) -> None:
        """No rank copies any more of what the request was offered: judges what all of them have."""
        for at in range(request.good):
            for alike in range(engine.model.replicas):
                ranks = range(alike, engine.model.world, engine.model.replicas)
                shards = [request.got[rank][at] for rank in ranks]
                identity = engine.identity(request.epoch, request.names[request.first + at])
                self._world.oracle.judge(identity, shards, request.asked)
        assert request.ask is not None
        if request.failed:
            bad = 32 * (request.first + request.good)
            engine.scheduler.forget(request.ask.session, request.digests[bad : bad + 32], request.epoch)
        self._world.finish(engine, request, "recalled")
