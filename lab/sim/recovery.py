"""The end of a walk: faults stop, everything that is under way ends, nothing is left over, and hits come back."""

from __future__ import annotations

from itertools import product

from lab.sim.bounds import balance, directories, has_room
from lab.sim.engine import Engine, Phase, Request
from lab.sim.oracle import Violation
from lab.sim.setup import EPOCHS
from lab.sim.tails import parts
from lab.sim.world import World
from stepwell.hierarchy import audit

_POLL_S = 0.01
_PATIENCE_S = 60.0
"""Of the simulated clock: everything that an engine does ends in far less."""

_PAUSE_S = 30.0
"""The longest that a tier is not asked after its last failure (docs/trust.md, Limits)."""

_LEFT_ALONE_S = 300.0
"""The longest that a directory, whose device has refused writes, is given none."""

_EPOCH = 99
"""From here on nobody has spilled anything."""


def comes_back(world: World) -> None:
    """Raises Violation."""
    _end_what_is_under_way(world)
    _nothing_is_left(world)
    _looks(world)
    _hits(world)
    if not world.stop_well(_PATIENCE_S):
        raise Violation("late", "a well on good disks does not drain")
    for engine in list(world.engines):
        world.exit(engine)
    settle(world)


def settle(world: World) -> None:
    """All that happens without a new request and without time."""
    for _ in range(10_000):
        busy = False
        if world.life is not None:
            busy = world.life.hierarchy.turn()
            busy = world.life.fibres.step() or busy
        for line in world.lines:
            busy = line.up() or busy
            busy = line.down() or busy
        world.tell_exits()
        world.tidy()
        for engine in world.engines:
            for each in engine.workers:
                busy = each.map() or busy
            for copy in engine.copies:
                busy = world.copy(engine, copy) or busy
        if not busy:
            return
    raise Violation("late", "it never comes to rest")


def _pass(world: World) -> None:
    settle(world)
    for engine in world.engines:
        world.look_at_spills(engine)
        for request in list(engine.requests):
            world.poll(engine, request)
            if request.phase is Phase.OFFERED:
                world.recall(engine, request)
    settle(world)
    world.clock.advance(_POLL_S)


def _end_what_is_under_way(world: World) -> None:
    """Still in whatever weather there is: requests end although nothing else gets better."""
    until = world.clock.now() + _PATIENCE_S
    while any(engine.busy for engine in world.engines):
        _pass(world)
        if world.clock.now() > until:
            waiting = [request.number for engine in world.engines for request in engine.requests]
            raise Violation("late", f"requests {waiting} never end")
    settle(world)
    for session in world.life.hierarchy.registry.sessions.values() if world.life is not None else ():
        if session.requests or session.transfers:
            left = f"{len(session.requests)} requests, {len(session.transfers)} transfers"
            raise Violation("books", f"left of an engine that asks for nothing any more: {left}")


def _nothing_is_left(world: World) -> None:
    world.heal()
    if world.life is None:
        world.open()
    life = world.life
    assert life is not None
    for engine in list(world.engines):
        world.exit(engine)
    settle(world)
    world.clock.advance(_PAUSE_S)  # a tier that failed is tried again, by time alone
    settle(world)
    audit.hierarchy(life.hierarchy)
    counted = life.hierarchy.arena.count()
    left = {what: counted[what] for what in ("pinned_bytes", "leased_blocks", "quarantined_slots", "filling")}
    for level in life.hierarchy.stack.levels:
        reads, writes = level.reads, level.writes
        left |= {f"{level.name} promoting": len(reads.promoting), f"{level.name} reading": len(reads.reading)}
        left |= {f"{level.name} writing": len(writes.writing), f"{level.name} queued bytes": writes.queued_bytes}
    left["sessions"] = life.hierarchy.sessions
    left["quarantines"] = len(life.hierarchy.registry.quarantines)
    if any(left.values()):
        raise Violation("books", "left when nobody is there any more: " + str({k: n for k, n in left.items() if n}))


def _looks(world: World) -> None:
    """Parts of blocks that a look says are there: whoever asks for one gets it, or the next look knows better."""
    for kind, model in enumerate(world.setup.models):
        if not model.groups:
            continue
        engine = _joined(world, kind)
        for digests, epoch in product(world.setup.prompts, EPOCHS):
            stored, names = parts(model, digests)
            for at, here in enumerate(_seen(world, engine, stored, epoch)):
                if not here:
                    continue
                world.oracle.judge_look(engine.identity(epoch, names[at]), world.trace.events)
                part = stored[32 * at : 32 * at + 32]
                request = world.tails.ask_part(engine, part, names[at], epoch)
                _until_ended(world, request)
                if not request.good and any(_seen(world, engine, part, epoch)):
                    why = request.ask.reason if request.ask is not None else "no session"
                    raise Violation("looks", f"what nobody gets is still said to be there ({why or 'it failed'})")
                world.seen["looks believed" if request.good else "looks that were wrong"] += 1


def _seen(world: World, engine: Engine, digests: bytes, epoch: int) -> bytes:
    look = engine.scheduler.look(digests, epoch)
    settle(world)
    if look is None or look.here is None:
        raise Violation("late", "a look is not answered")
    return look.here


def _hits(world: World) -> None:
    """The well that has lived through all that takes blocks in again: they are found at once, whatever its disks say,
    and, when the disks are asked again, by the next well, from disk. That one does the same, for the one after it. One
    of both is killed, the other stops: what was written, as its completion said, is found after either. What a kill
    loses of a well that writes back, nobody has promised."""
    assert world.life is not None
    faults = sum(files.met for files in world.life.files)
    world.whims = False
    _streams(world)
    digests = max(world.setup.prompts, key=len)[: 32 * 2]
    _spill(world, digests, _EPOCH)
    if _found(world, _joined(world), digests, _EPOCH) < 2:
        raise Violation("hits", "what was spilled in fair weather is not found in host memory")
    if world.setup.write == "back":
        return
    asked = has_room(world)
    if asked:
        _renew(world)
    killed = world.dice.random() < 0.5
    for turn, kill in enumerate((killed, not killed)):
        balance(world)
        room = has_room(world)
        _spill(world, digests, _EPOCH + 1 + turn)
        _end(world, kill=kill)
        found = _found(world, _joined(world), digests, _EPOCH + 1 + turn)
        how = "kill" if kill else "stop"
        if room and found < 2:
            raise Violation("warm", f"of 2 blocks that were written in fair weather {found} are found after a {how}")
        world.seen[f"found after a {how}" if room else "no room on disk"] += 1
    settle(world)
    balance(world)
    if asked:
        world.seen["asked after faults" if faults else "asked without faults"] += 1


def _streams(world: World) -> None:
    """All comes that the well says is known, however little of it fits into its memory at a time, and without time,
    however many come at once; but for what a disk has spoilt, and for what was in memory alone and had to go."""
    engine = _joined(world)
    for epoch in EPOCHS:
        requests: list[Request] = []
        while len(requests) < len(world.setup.prompts) or any(request.phase is Phase.WAITING for request in requests):
            if len(requests) < len(world.setup.prompts) and world.dice.random() < 0.1:
                requests.append(world.ask(engine, world.setup.prompts[len(requests)], epoch, len(requests)))
                requests[-1].streams = True
            if not _one_event(world) and len(requests) == len(world.setup.prompts):
                world.clock.advance(_POLL_S)
            for request in requests:
                world.poll(engine, request)
                if request.phase is Phase.OFFERED:
                    world.recall(engine, request)
        settle(world)
        for request in requests:
            if request.phase is not Phase.ENDED:
                raise Violation("hits", f"a stream of {request.offered} blocks waits for nothing")
            at = request.first + request.good
            if (
                request.ended
                and at < request.offered
                and all(_is_there(world, request, block) for block in range(at + 1))
            ):
                came = f"{request.good} of {request.offered - request.first} blocks"
                raise Violation("hits", f"{came} of a stream have come in fair weather: {sorted(request.ended)}")
            world.seen["streams in fair weather"] += bool(request.ended)


def _is_there(world: World, request: Request, at: int) -> bool:
    """The well has this block of the request, in memory or on a disk."""
    assert world.life is not None
    well = world.life.hierarchy
    (session,) = well.registry.sessions.values()
    ids = [origin.name(request.digests[32 * at : 32 * at + 32]) for origin in session.origins(request.epoch)]
    return any(id in well.index for id in ids) or well.stack.find(*ids) is not None


def _one_event(world: World) -> bool:
    """A turn of the well, a step of a job, or a message. False: there is none."""
    assert world.life is not None
    if world.life.hierarchy.turn() or world.life.fibres.step():
        return True
    if any(line.up() or line.down() for line in world.lines):
        return True
    return any(world.copy(engine, copy) for engine in world.engines for copy in engine.copies)


def _end(world: World, *, kill: bool) -> None:
    assert world.life is not None
    if kill:
        if not all(level.writes.idle for level in world.life.hierarchy.stack.levels):
            raise Violation("late", "blocks are never written to good disks")
        world.end_well()
    else:
        world.stop_well()
    settle(world)
    world.open()


def _renew(world: World) -> None:
    """Fills what segments were open when the faults stopped. The disk may have lost such a one's head, or somebody its
    name: what goes in there is lost, and nobody can know."""
    part = [directory for directory in directories(world) if directory.ready]
    open_then = [directory.open_segment for directory in part]
    digests = max(world.setup.prompts, key=len)[: 32 * 4]
    most = 4 * len(part) * world.setup.segment // world.setup.models[0].frames
    for turn in range(most):
        if any(directory.space.ill for directory in part):
            world.clock.advance(_LEFT_ALONE_S)
            settle(world)
        if all(d.open_segment not in (None, then) for d, then in zip(part, open_then, strict=True)):
            return
        _spill(world, digests, _EPOCH + 10 + turn)
    raise Violation("hits", "a well that has seen faults does not write to good disks again")


def _spill(world: World, digests: bytes, epoch: int) -> None:
    engine = _joined(world)
    for _ in range(2 if engine.model.groups else 1):  # what there was no room for yet is offered again
        world.spill(engine, digests, epoch, 0)
        for _ in range(4):
            _pass(world)
    if world.setup.write == "second_touch":
        _found(world, engine, digests, epoch)


def _joined(world: World, kind: int = 0) -> Engine:
    for engine in list(world.engines):
        world.exit(engine)
    engine = world.join(kind)
    settle(world)
    if not engine.scheduler.live:
        raise Violation("hits", "an engine cannot join")
    return engine


def _found(world: World, engine: Engine, digests: bytes, epoch: int) -> int:
    """Blocks that a request gets which asks for these."""
    request: Request = world.ask(engine, digests, epoch, 0)
    _until_ended(world, request)
    if request.tail is not None:  # it gets all that it needs to go on behind so many, or nothing
        return request.tail.blocks if request.good else 0
    return request.first + request.good  # it had the first ones already


def _until_ended(world: World, request: Request) -> None:
    until = world.clock.now() + _PATIENCE_S
    while request.phase is not Phase.ENDED:
        _pass(world)
        if world.clock.now() > until:
            raise Violation("late", f"request {request.number} never ends")
