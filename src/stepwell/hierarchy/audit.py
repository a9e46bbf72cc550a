"""Proof of the books: everything that is counted is counted again by walking it. For tests and idle moments."""

from __future__ import annotations

from collections import Counter

from stepwell.block.state import BlockState
from stepwell.errors import IntegrityError
from stepwell.hierarchy.arena.arena import Arena, Sums
from stepwell.hierarchy.arena.records import Entry, SlabPhase
from stepwell.hierarchy.arena.slab_pool import SlabPool
from stepwell.hierarchy.hierarchy import Hierarchy
from stepwell.hierarchy.sessions.shares import OVERHEAD


def arena(arena: Arena, slabs: SlabPool) -> None:
    """Raises IntegrityError unless slots, entries, pins and sums of the arena agree with each other."""
    wrong: list[str] = []
    if arena.sums != _recount(arena, slabs):
        wrong.append(f"{arena.sums} counted, {_recount(arena, slabs)} found")
    if slabs.bytes != sum(s.layout.nbytes for s in slabs.slabs.values()) or slabs.bytes > arena.host_bytes:
        wrong.append(f"{slabs.bytes} bytes of slabs")
    entries: dict[int, Entry] = {}
    for slab in slabs.slabs.values():
        if slab.phase is SlabPhase.RETIRED:
            continue
        slots = [*slab.free, *slab.held, *slab.quarantined]
        if sorted(slots) != list(range(slab.layout.slots)):
            wrong.append(f"slab {slab.number}: slots {sorted(slots)}")
        for slot, entry in slab.held.items():
            entries[id(entry)] = entry
            if (slab, slot) not in entry.slots or entry.state is BlockState.ABSENT:
                wrong.append(f"slab {slab.number} slot {slot}: entry lies elsewhere or is {entry.state}")
            if entry.state is BlockState.DRAINING and not (entry.pins or entry.leases):
                wrong.append("a draining block that is not held")
    children: dict[int, int] = {}
    for entry in entries.values():
        if entry.parent is not None:
            children[id(entry.parent)] = children.get(id(entry.parent), 0) + 1
    for entry in entries.values():
        if entry.state is not BlockState.DRAINING and entry.children != children.get(id(entry), 0):
            wrong.append(f"block counts {entry.children} children, has {children.get(id(entry), 0)}")
    pinned = sum(e.nbytes for e in entries.values() if e.pins)
    pins = sum(e.pins for e in entries.values())
    if (pinned, pins) != (arena.pinned_bytes, arena.pins):
        wrong.append(f"{arena.pins} pins on {arena.pinned_bytes} bytes counted, {pins} on {pinned} found")
    leaving = sum(s.layout.nbytes for s in slabs.slabs.values() if s.phase is SlabPhase.RETIRED)
    if leaving != slabs.retired.bytes:
        wrong.append(f"{slabs.retired.bytes} bytes being given back, {leaving} found")
    kept = sum(s.layout.nbytes for s in slabs.slabs.values() if s.retirement is not None and s.retirement.punched)
    if kept != slabs.retired.kept:
        wrong.append(f"{slabs.retired.kept} bytes kept by members, {kept} found")
    if any(s.retirement is not None and s.retirement.punched and not s.keepers for s in slabs.slabs.values()):
        wrong.append("a retired slab that no member keeps")
    remembered = sum(holding.residents.remembered for holding in arena.holdings.values())
    for owner, residents in arena.past_owners.items():
        remembered += residents.remembered
        if owner in arena.holdings or not residents.remembered or residents.wrong():
            wrong.append(f"an owner that has gone is here, or is remembered for nothing: {residents.wrong()}")
    if remembered != arena.tally.blocks or remembered > arena.past_owners.most:
        wrong.append(f"{arena.tally.blocks} blocks remembered of at most {arena.past_owners.most}, {remembered} found")
    for owner, holding in arena.holdings.items():
        if holding.over:
            wrong.append(f"owner of {owner.slot_bytes}-byte slots has neither engines nor slabs")
        stay = [e for s in holding.slabs for e in s.held.values() if e.state is not BlockState.DRAINING]
        if any(e.history.entry is not e for e in stay):
            wrong.append(f"owner of {owner.slot_bytes}-byte slots: a block's history is another's")
        if amiss := holding.residents.wrong():
            wrong.append(f"owner of {owner.slot_bytes}-byte slots: {amiss}")
        held = owner.slot_bytes * sum(entry.pins > 0 for s in holding.slabs for entry in s.held.values())
        if holding.pinned_bytes != held:
            wrong.append(f"owner of {owner.slot_bytes}-byte slots counts {holding.pinned_bytes} pinned, has {held}")
        free = sum(len(s.free) for s in holding.slabs)
        if holding.free != free or holding.roomy.keys() != {s.number for s in holding.slabs if s.free}:
            wrong.append(f"owner of {owner.slot_bytes}-byte slots counts {holding.free} free slots, has {free}")
    _verdict("the arena's books do not balance", wrong)


def _recount(arena: Arena, slabs: SlabPool) -> Sums:
    entries = arena.entries()
    resident = [e for e in entries if e.state is BlockState.RESIDENT]
    return Sums(
        blocks=len(resident),
        block_bytes=sum(e.nbytes for e in resident),
        filling=sum(e.state is BlockState.FILLING for e in entries),
        leased_blocks=sum(e.leases > 0 for e in entries),
        quarantined_slots=sum(len(s.quarantined) for s in slabs.slabs.values()),
    )


def hierarchy(well: Hierarchy) -> None:
    """Raises IntegrityError unless index, sessions and arena agree on who holds what, and the arena with itself."""
    arena(well.arena, well.slabs)
    levels, guesses = well.stack.levels, well.migration.prefetch
    wrong: list[str] = []
    for key, entry in well.index.items():
        if entry.id != key or entry.state not in (BlockState.FILLING, BlockState.RESIDENT):
            wrong.append(f"index holds a block that is {entry.state.value}")
    pins: dict[int, int] = {}
    leases: dict[int, int] = {}
    filling: set[int] = set()
    for request in (*well.leaving, *(t for s in well.registry.sessions.values() for t in s.requests.values())):
        for entry in request.pinned[request.freed :]:
            pins[id(entry)] = pins.get(id(entry), 0) + 1
    for session in well.registry.sessions.values():
        for transfer in session.transfers.values():
            for entry in transfer.entries:
                leases[id(entry)] = leases.get(id(entry), 0) + 1
        filling |= {id(f.entry) for f in session.fills.values()}
    for level in levels:
        for entry in level.writes.leased:
            leases[id(entry)] = leases.get(id(entry), 0) + 1
        filling |= {id(entry) for entry in level.reads.promoting}
        if level.writes.queued_bytes != sum(entry.nbytes for entry in level.writes.owed):
            wrong.append(f"{level.writes.queued_bytes} bytes are to be written, of {len(level.writes.owed)} blocks")
    if guesses is not None and guesses.held_bytes != sum(entry.nbytes for entry in guesses.held):
        wrong.append(f"{guesses.held_bytes} bytes of guesses, of {len(guesses.held)} blocks")
    if (held := _held(well)) is not None and held != well.held.by_tenant:
        wrong.append(f"{dict(well.held.by_tenant)} bytes wait for the tenants' sessions, {held} found")
    quarantined = 0
    for quarantine in well.registry.quarantines:
        quarantined += len(quarantine.slots)
        for entry in quarantine.entries:
            leases[id(entry)] = leases.get(id(entry), 0) + 1
    here = {session.owner for session in well.registry.sessions.values() if session.owner is not None}
    if (present := {owner for owner, holding in well.arena.holdings.items() if holding.present}) != here:
        wrong.append(f"{len(present)} owners have engines connected, by their sessions {len(here)}")
    counted = well.arena.count()
    if quarantined != counted["quarantined_slots"]:
        wrong.append(f"{counted['quarantined_slots']} slots quarantined, {quarantined} accounted for")
    for entry in well.arena.entries():
        expected = (pins.get(id(entry), 0), leases.get(id(entry), 0))
        if (entry.pins, entry.leases) != expected:
            wrong.append(f"a block has {entry.pins} pins and {entry.leases} leases, sessions hold {expected}")
        if (entry.state is BlockState.FILLING) != (id(entry) in filling):
            wrong.append("a block is FILLING and no session or read fills it, or the reverse")
        lost = entry.state is BlockState.DRAINING or well.stack.promoting(entry) is not None  # of a read that hangs
        if not lost and well.index.get(entry.id) is not entry:
            wrong.append("a block of the arena is not in the index")
    members = {m.number for session in well.registry.sessions.values() for m in session.workers.values()}
    for slab in well.slabs.slabs.values():
        if strangers := slab.keepers - members - well.registry.keeping.keys():
            wrong.append(f"slab {slab.number} is kept by {sorted(strangers)}, which are not connected and not watched")
    _verdict("the hierarchy's books do not balance", wrong)


def _held(well: Hierarchy) -> dict[str, int] | None:
    """Bytes of what waits, by tenant; None while some of it is queued work."""
    if not well.idle:
        return None
    found: Counter[str] = Counter()
    for session in well.registry.sessions.values():
        nbytes = sum(len(request.digests) + OVERHEAD for request in session.requests.values())
        if nbytes != session.held_bytes:
            return {session.tenant: nbytes - session.held_bytes}
        found[session.tenant] += nbytes
    return dict(+found)


def _verdict(what: str, wrong: list[str]) -> None:
    if wrong:
        raise IntegrityError("SW-304", what=what, why="; ".join(wrong), fix="report this: it is a bug in stepwell")
