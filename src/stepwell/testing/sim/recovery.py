"""The end of a walk: faults stop, everything that is under way ends, nothing is left over, and hits come back."""

from __future__ import annotations

from stepwell.testing.sim.engine import Engine, Phase, Request
from stepwell.testing.sim.oracle import Violation
from stepwell.testing.sim.world import World

_POLL_S = 0.01
_PATIENCE_S = 60.0
"""Of the simulated clock: everything that an engine does ends in far less."""

_LONGEST_ILL_S = 400.0
"""After this a disk is tried again that had refused whatever it was asked to do."""


def comes_back(world: World) -> None:
    """Raises Violation."""
    _end_what_is_under_way(world)
    _nothing_is_left(world)
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
                world.copy(engine, copy)
                busy = True
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


def _nothing_is_left(world: World) -> None:
    world.heal()
    if world.life is None:
        world.open()
    life = world.life
    assert life is not None
    for engine in list(world.engines):
        world.exit(engine)
    settle(world)
    for _ in range(3):  # a tier that failed is tried again, by time alone
        world.clock.advance(_LONGEST_ILL_S)
        settle(world)
    life.hierarchy.check()
    counted = life.hierarchy.arena.count()
    mover = life.hierarchy.mover
    left = {what: counted[what] for what in ("pinned_bytes", "leased_blocks", "quarantined_slots", "filling")}
    left |= {"staging": len(mover.staging), "reading": len(mover.reading), "writing": len(mover.writing)}
    left |= {"queued_bytes": mover.queued_bytes, "sessions": life.hierarchy.sessions}
    left["quarantines"] = len(life.hierarchy.roster.quarantines)
    if any(left.values()):
        raise Violation("books", "left when nobody is there any more: " + str({k: n for k, n in left.items() if n}))


def _hits(world: World) -> None:
    """A prompt that is spilled now is found, at once and by the next well, which has it from disk. Where a disk has
    lied or rotted, or somebody has deleted files, another comes first: the segment that is open may have no head, or no
    name, and what goes in there is lost."""
    if world.lied or world.seen["rot at rest"] or world.seen["deleted"]:
        world.stop_well()
        settle(world)
        world.open()
    world.whims = False
    engine = _joined(world)
    digests = max(world.setup.prompts, key=len)[: 32 * 2]
    epoch = 99  # nobody has spilled anything there
    world.spill(engine, digests, epoch, 0)
    for _ in range(4):
        _pass(world)
    if not _found(world, engine, digests, epoch):
        raise Violation("hits", "what was spilled in fair weather is not found in host memory")
    room = _room(world)
    world.stop_well()
    settle(world)
    world.open()
    engine = _joined(world)
    found = _found(world, engine, digests, epoch)
    if room and not found:
        raise Violation("hits", "what was spilled in fair weather is not found on disk by the next well")
    world.seen["hits from disk"] += found > 0
    world.seen["no room for hits from disk"] += not room


def _room(world: World) -> bool:
    """Every directory can hold two segments beside what it must keep because it cannot read it. One that cannot refuses
    its share of what is written, whatever room others have; with one alone, each block takes the place of the last."""
    assert world.life is not None
    for directory in world.life.hierarchy.mover.tier._directories:  # type: ignore[attr-defined]
        ours = sum(s.nbytes for s in directory.segments.values() if s.phase.value != "kept")
        if directory.limit - (directory.used - ours) < 2 * directory.segment_bytes:
            return False
    return True


def _joined(world: World) -> Engine:
    for engine in list(world.engines):
        world.exit(engine)
    engine = world.join(0)
    settle(world)
    if not engine.scheduler.live:
        raise Violation("hits", "an engine cannot join")
    return engine


def _found(world: World, engine: Engine, digests: bytes, epoch: int) -> int:
    request: Request = world.ask(engine, digests, epoch, 0)
    until = world.clock.now() + _PATIENCE_S
    while request.phase is not Phase.ENDED:
        _pass(world)
        if world.clock.now() > until:
            raise Violation("late", f"request {request.number} never ends")
    return request.good
