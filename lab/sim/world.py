"""Everything that there is in one simulation, and what its parts do when they are told to; `walk` says when.

The rules of the oracle are checked where things happen: bytes when a recall's copies have ended, limits whenever a
request is told to wait, slots whenever somebody copies.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from lab.sim.copies import Copies
from lab.sim.disk import Disk
from lab.sim.engine import Copy, Engine, Phase, Request, Spilling, StreamCopy, names_of
from lab.sim.life import Life, Surroundings, keyring
from lab.sim.limits import Queue
from lab.sim.line import Line
from lab.sim.oracle import Fill, Oracle
from lab.sim.setup import Setup
from lab.sim.streams import Streams
from lab.sim.tails import Tails
from lab.sim.trace import Trace
from lab.sim.weather import FAIR
from stepwell.errors import BackendDown, StepwellError
from stepwell.hierarchy.requests.clearing import Sum
from stepwell.protocol import messages as m
from stepwell.protocol.link import Dial, Link, Receiver
from stepwell.tiers.faulty import TierFaults

STREAMED = 0.4
"""Share of requests that are recalled as streams, if they can be."""

HOLD_S = 0.1
"""How long an engine waits for slots before it gives a spill up."""


class World:
    """`life`: the well that there is, if there is one."""

    def __init__(self, setup: Setup, dice: Random, trace: Trace) -> None:
        self.setup = setup
        self.dice = dice
        self.trace = trace
        self.seen: Counter[str] = Counter()
        self.oracle = Oracle()
        self.around = Surroundings(setup, dice, keyring(dice))
        self.clock = self.around.clock
        total = setup.segment * (setup.segments + 2) + setup.reserve
        self.disks = [Disk(total, setup.reserve) for _ in range(setup.directories)]
        self.models = list(setup.models)  # and those that came with other weights
        self.engines: list[Engine] = []
        self.lines: list[Line] = []
        self.watched: list[Line] = []  # whose processes' exits the well wants to see
        self.exited: set[int] = set()  # processes
        self.fills: dict[tuple[int, int], Fill] = {}  # by session and lease
        self.sessions: set[int] = set()  # of the well that there is
        self.requests = 0
        self.clearing = 0  # clears that are under way in this life
        self.whims = True  # engines give some of their spills up
        self.life: Life | None = None
        self.copies = Copies(self)
        self.streams = Streams(self)
        self.tails = Tails(self)

    # the well ---------------------------------------------------------------------------------------------------------

    def open(self) -> Life:
        for disk in self.disks:
            disk.limit = self.setup.segment * self.around.segments
        self.life = Life(self.around, self.disks, self.trace, self.seen)
        return self.life

    def end_well(self, *, power: bool = False) -> None:
        """The well is killed; or the power goes, and with it all engines."""
        if self.life is None:
            return
        self.life.kill()
        self._well_gone()
        if power:
            for engine in list(self.engines):
                self.exit(engine)
            self.disks = [disk.after_power_cut(self.dice) for disk in self.disks]

    def stop_well(self, patience_s: float = 5.0) -> bool:
        """Whether it had written everything by then."""
        drained = True
        if self.life is not None:
            for line in self.lines:
                line.cut()
            for line in self.lines:
                while line.up():
                    pass
            self.tell_exits()
            drained = self.life.stop(patience_s)
            self._well_gone()
        return drained

    def heal(self) -> None:
        """Nothing is wrong with disks and memory any more."""
        for disk in self.disks:
            disk.taken = 0
        if self.life is not None:
            self.life.memory.refuse = False
            self.life.fibres.halting = 0.25
            self.life.fibres.release()
            for files in self.life.files:
                files.weather = FAIR
            if self.life.far is not None:
                self.life.far.faults = TierFaults()
                self.life.far.release()

    def abandon(self) -> None:
        """Gives back what the simulation itself holds of this machine, whatever state it is in."""
        if self.life is not None:
            self.life.kill()
            self._well_gone()
        for engine in list(self.engines):
            self.exit(engine)
        for line in self.lines:
            while line.down():
                pass

    def _well_gone(self) -> None:
        for line in self.lines:
            line.well_gone()
        self.watched.clear()
        self.sessions.clear()
        self.clearing = 0
        self.life = None

    # connections ------------------------------------------------------------------------------------------------------

    def dial(self, engine: Engine, process: int) -> Dial:
        def dial(hello: m.Hello, receiver: Receiver) -> Link:
            if self.life is None:
                raise BackendDown("SW-503", what="no well", why="it is dead at the moment", fix="wait")
            line = Line(self.life, 10 * engine.number + process, hello, receiver, self._heard)
            self.lines.append(line)
            self.watched.append(line)
            return line

        return dial

    def _heard(self, line: Line, message: m.Message) -> None:
        self.trace(line.process, message)
        match message:
            case m.Welcome(session=session):
                if line.life is self.life:
                    self.sessions.add(session)
            case m.Filled(leases=leases, dropped=dropped) if line.member is not None:
                for lease in (*leases, *dropped):
                    fill = self.fills.get((line.member.session.number, lease))
                    if fill is not None:
                        fill.landed.add(line.member.hello.rank)
                        fill.dropped |= lease in dropped
            case m.Found():
                for queue in self._queues(line):
                    queue.told(message, self.clock.now())
            case m.GiveWay():
                for queue in self._queues(line):
                    queue.gave_way(message)
            case m.LineMoved(apart=apart):
                for queue in self._queues(line):
                    queue.moved(message, self.clock.now())
                self.streams.heard(line.process, lambda copy: copy.transfer not in apart, message)
            case m.Landed(transfer=transfer):
                self.streams.heard(line.process, lambda copy: copy.transfer == transfer)

    def _queues(self, line: Line) -> list[Queue]:
        """The queue of the engine whose scheduler is at this line; none if it is a worker's, or of one that is gone."""
        return [engine.queue for engine in self.engines if line.process == 10 * engine.number]

    def trouble(self, error: StepwellError) -> None:
        self.seen[f"engine told {error.code}"] += 1

    def tidy(self) -> None:
        self.lines = [line for line in self.lines if not line.over]

    # engines ----------------------------------------------------------------------------------------------------------

    def join(self, kind: int) -> Engine:
        self.seen["engines"] += 1
        engine = Engine(self.seen["engines"], kind, self.models[kind], self.clock, self.dial, self.trouble)
        self.engines.append(engine)
        return engine

    def renew(self, kind: int) -> Engine:
        """An engine like those of this kind, with weights that no other has."""
        self.seen["new weights"] += 1
        self.models.append(replace(self.models[kind], weights=self.dice.randbytes(32)))
        return self.join(len(self.models) - 1)

    def exit(self, engine: Engine) -> None:
        engine.exit()
        self.engines.remove(engine)
        for request in engine.requests:
            request.phase = Phase.ENDED
        self.exited |= set(range(10 * engine.number, 10 * engine.number + 10))

    def tell_exits(self) -> None:
        """The well sees which processes are no more."""
        watched, self.watched = self.watched, []
        for line in watched:
            if line.process in self.exited and line.member is not None:
                self.trace("exited", line.process)
                line.life.hierarchy.exited(line.member)
            elif not line.over or line.member is not None:
                self.watched.append(line)

    # requests ---------------------------------------------------------------------------------------------------------

    def ask(self, engine: Engine, digests: bytes, epoch: int, order: int) -> Request:
        self.requests += 1
        if engine.model.groups:
            return self.tails.ask(engine, digests, epoch, order)
        ask, names = engine.scheduler.ask(digests, epoch, order), names_of(digests)
        request = Request(self.requests, self.trace.events, epoch, digests, names, ask)
        request.streams = self.dice.random() < STREAMED
        engine.requests.append(request)
        engine.queue.entered(request.ask)
        return request

    def poll(self, engine: Engine, request: Request) -> None:
        """The engine's scheduler comes to this request."""
        ask, now = request.ask, self.clock.now()
        if request.phase is not Phase.WAITING:
            return
        if ask is None:
            self.finish(engine, request, "no session")
            return
        engine.queue.polled(ask, now)
        if request.tail is not None:
            self.tails.poll(engine, request, request.tail, ask)
            return
        request.streams = request.streams and (bool(ask.ends) or not ask.final)
        known = request.streams and bool(ask.ends)
        if not engine.scheduler.settle(ask, 0) and not (known and max(ask.blocks, ask.known)):
            engine.queue.still_in_time(ask, now)
        else:
            request.streams = known
            request.offered = engine.scheduler.offer(ask, streamed=known)
            request.phase = Phase.OFFERED
            engine.queue.offered(ask, now, streams=known)
            if not request.offered:
                engine.queue.left(ask, now)
                engine.scheduler.release(ask)
                self.finish(engine, request, ask.reason)

    def recall(self, engine: Engine, request: Request) -> None:
        """The engine has room for what was offered, and recalls it; at times it has the first of it already."""
        ask = request.ask
        assert ask is not None
        if request.tail is not None:
            self.tails.recall(engine, request, request.tail, ask)
            return
        request.first = 0 if self.dice.random() < 0.8 else self.dice.randrange(request.offered)
        if request.streams:
            self.streams.begin(engine, request)
            return
        blocks = request.offered - request.first
        transfer, refs = engine.scheduler.recall(ask, request.first, blocks)
        engine.queue.left(ask, self.clock.now())
        request.phase, request.good = Phase.COPYING, blocks
        request.missing = set(range(engine.model.world))
        for rank, each in enumerate(engine.workers):
            shard = rank // engine.model.replicas
            each.copies.append(Copy(each, rank, shard, ask.session, refs[:, shard], [], [], request, [transfer]))

    def release(self, engine: Engine, request: Request) -> None:
        """Aborted, while it waits or was offered something."""
        if request.ask is not None and request.phase in (Phase.WAITING, Phase.OFFERED):
            engine.queue.left(request.ask, self.clock.now())
            engine.scheduler.release(request.ask)
            self.tails.end(engine, request)
            self.finish(engine, request, "aborted")

    def finish(self, engine: Engine, request: Request, why: str) -> None:
        """The request has ended, and why."""
        request.phase = Phase.ENDED
        if request in engine.requests:
            engine.requests.remove(request)
        self.seen[f"ended: {why or 'unanswered'}"] += 1
        self.trace("request", request.number, why, request.good)

    # spills -----------------------------------------------------------------------------------------------------------

    def spill(self, engine: Engine, digests: bytes, epoch: int, first: int) -> None:
        if engine.model.groups:
            self.tails.spill(engine, digests, epoch, first)
            return
        parent, rest = digests[32 * first - 32 : 32 * first], digests[32 * first :]
        self.reserve(engine, parent, rest, epoch, first, names_of(rest))

    def reserve(
        self, engine: Engine, parent: bytes, digests: bytes, epoch: int, first: int, names: list[bytes], depth: int = 0
    ) -> None:
        spill = engine.scheduler.reserve(parent, digests, epoch, first, depth)
        if spill is not None:
            engine.spills.append(Spilling(epoch, names, spill, self.clock.now()))

    def look_at_spills(self, engine: Engine) -> None:
        for spilling in list(engine.spills):
            spill = spilling.spill
            if not spill.granted:
                if self.clock.now() - spilling.since > HOLD_S:
                    engine.scheduler.abandon(spill, 0)
                    engine.spills.remove(spilling)
                continue
            engine.spills.remove(spilling)
            keep = (
                spill.blocks if not self.whims or self.dice.random() < 0.85 else self.dice.randrange(spill.blocks + 1)
            )
            if keep < spill.blocks:
                engine.scheduler.abandon(spill, keep)
            self._copy_out(engine, spilling, keep)

    def _copy_out(self, engine: Engine, spilling: Spilling, keep: int) -> None:
        spill = spilling.spill
        leases = [(block, lease) for block, lease in enumerate(spill.leases) if lease]
        mine = [(block, lease) for block, lease in leases if block < keep]
        if not mine or spill.refs is None:
            return
        fills = []
        for block, lease in mine:
            fill = self.oracle.begin(engine.identity(spilling.epoch, spilling.names[block]), engine.model.shards)
            self.fills[spill.session, lease] = fill
            fills.append(fill)
        rows = spill.refs[: len(mine)]
        for shard, each in enumerate(engine.workers[:: engine.model.replicas]):
            rank = shard * engine.model.replicas
            each.copies.append(
                Copy(each, rank, shard, spill.session, rows[:, shard], [lease for _, lease in mine], list(fills))
            )

    # copies -----------------------------------------------------------------------------------------------------------

    def copy(self, engine: Engine, copy: Copy | StreamCopy) -> bool:
        """Goes on with a copy. False: it waits for blocks."""
        if isinstance(copy, StreamCopy):
            return self.streams.go_on(engine, copy)
        self.copies.go_on(engine, copy)
        return True

    # an operator ------------------------------------------------------------------------------------------------------

    def clear(self, kind: int, epoch: int) -> None:
        """Of one namespace, or, with kind -1, of everything. When it is done, and all of it, nothing comes back. It is
        not held against a disk with a file that has lied: what it deleted may not be what lay there. A lie in a file
        that is gone by then brings nothing back, nor does one that comes after it."""
        life = self.life
        if life is None:
            return
        tag = b"" if kind < 0 else self._tag(life, kind, epoch)
        if tag is None:
            return
        concerned = self.oracle.clearing(kind, epoch)
        self.clearing += 1

        def done(sums: dict[str, Sum]) -> None:
            whole = all(each.whole for each in sums.values())
            self.clearing -= 1
            self.trace("cleared", whole, len(concerned))
            self.seen["cleared" if whole else "cleared in part"] += 1
            lied = any(disk.lied for disk in self.disks)
            if whole:
                self.seen["clears not held" if lied else "clears held"] += 1
            if whole and not lied:
                for fill in concerned:
                    fill.cleared = self.trace.events

        life.hierarchy.operator.clear(life.hierarchy.operator.tiers, tag, done)

    def _tag(self, life: Life, kind: int, epoch: int) -> bytes | None:
        """Of the namespace that this model has at this moment; None: no engine of it is connected."""
        for session in life.hierarchy.registry.sessions.values():
            if session.keyed is not None and session.keyed.namespace.weights == self.models[kind].weights:
                return life.sealing.origins("default", session.keyed.namespace.at_epoch(epoch))[0].tag
        return None
