"""The well as a state machine: one promise of the architecture a test, with sessions played by hand."""

from __future__ import annotations

import random
from itertools import count

import msgspec
import pytest
from blake3 import blake3
from deep import PLAIN, TWO, at, chain

from lab.rig.members import FakeEngine, FakeMember, Model, Rig, read, write
from stepwell import events as e
from stepwell.block.namespace import DEFAULT_TENANT
from stepwell.hierarchy import audit, dispatch
from stepwell.hierarchy.dispatch import MAX_REQUESTS, MAX_RESERVE
from stepwell.hierarchy.requests import pins
from stepwell.hierarchy.requests.transfers import MAX_EARLY
from stepwell.hierarchy.sessions import registry, session
from stepwell.hierarchy.sessions.keyed import EPOCHS_KEPT
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.hierarchy.work import ROOM_WAIT_S, TURN_S
from stepwell.io.clock import Clock
from stepwell.protocol import messages as m
from stepwell.testing.arena_kit import SLAB, SLOT, SLOTS
from stepwell.vault.keyring import Epoch, Keyring, TenantKeys


def make_rig(host_bytes: int = 2 * SLAB, keyring: Keyring | None = None) -> Rig:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    return Rig(host_bytes, seed=seed, keyring=keyring)


def used_slots(rig: Rig) -> int:
    counted = rig.hierarchy.slabs.count() | rig.hierarchy.arena.count()
    return counted["slabs"] * SLOTS - counted["free_slots"]


@pytest.fixture
def rig() -> Rig:
    return make_rig()


def joined(rig: Rig, model: Model = PLAIN, name: str = "engine") -> FakeEngine:
    engine = FakeEngine(rig, model, name=name)
    rig.settle()
    return engine


# spills --------------------------------------------------------------------------------------------------------------


def test_spilled_is_recalled(rig: Rig) -> None:
    engine, digests = joined(rig), chain(4)
    assert engine.spill(digests, word=42) == 4
    ticket = engine.ask(digests + chain(1, 99))
    rig.settle()
    answer = engine.answer(ticket)
    assert (len(answer.refs), answer.more, answer.reason) == (4, False, "never_seen")
    transfer = engine.recall(ticket)
    (worker,) = engine.workers
    for row in answer.refs:
        assert [read(worker.slot(row[0]), place) for place in range(4)] == [42] * 4
        assert worker.holds(row[0])
    assert rig.hierarchy.stats()["leased_blocks"] == 4
    engine.recalled(transfer)
    rig.settle()
    stats = rig.hierarchy.stats()
    assert (stats["leased_blocks"], stats["pinned_bytes"], stats["recalled_blocks"]) == (0, 0, 4)


def test_a_block_is_published_when_all_ranks_have_acknowledged(rig: Rig) -> None:
    engine, digests = joined(rig, TWO), chain(1)
    (lease,), refs = engine.reserve(digests)
    assert refs.shape == (1, 2)
    other = joined(rig, TWO, "other")
    engine.workers[0].say(m.Filled([lease], []))
    engine.workers[0].say(m.Filled([lease], []))  # twice from one is not once from both
    assert other.found(digests) == 0
    engine.workers[1].say(m.Filled([lease], []))
    assert other.found(digests) == 1


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_drops_its_shard_says_so_and_the_block_is_never_published(rig: Rig, first: int) -> None:
    engine, digests = joined(rig, TWO), chain(1)
    (lease,), _ = engine.reserve(digests)
    engine.workers[first].say(m.Filled([], [lease]))
    assert rig.hierarchy.arena.count()["filling"] == 1  # the other rank may be writing
    engine.workers[1 - first].say(m.Filled([lease], []))
    assert engine.found(digests) == 0
    assert used_slots(rig) == 0


def test_another_sessions_spill_of_a_block_being_filled_is_refused(rig: Rig) -> None:
    one, two, digests = joined(rig), joined(rig, name="two"), chain(3)
    (lease,), _ = one.reserve(at(digests, 1))
    leases, refs = two.reserve(digests)
    assert [bool(n) for n in leases] == [True, False, True]
    assert len(refs) == 2
    assert rig.hierarchy.stats()["spills_refused_filling"] == 1
    one.workers[0].say(m.Filled([lease], []))
    two.workers[0].say(m.Filled([n for n in leases if n], []))
    assert two.found(digests) == 3
    assert two.spill(digests) == 0
    assert rig.hierarchy.stats()["spills_refused_resident"] == 3


def test_the_acknowledgement_of_another_session_does_not_count(rig: Rig) -> None:
    one, two, digests = joined(rig), joined(rig, name="two"), chain(1)
    (lease,), _ = one.reserve(digests)
    two.workers[0].say(m.Filled([lease], []))
    two.scheduler.say(m.Abandon([lease]))
    assert rig.hierarchy.arena.count()["filling"] == 1
    assert one.found(digests) == 0


def test_a_session_waits_for_what_it_fills_itself(rig: Rig) -> None:
    engine, other, digests = joined(rig), joined(rig, name="other"), chain(2)
    leases, _ = engine.reserve(digests)
    mine, theirs = engine.ask(digests), other.ask(digests)
    rig.settle()
    assert (engine.answer(mine).more, engine.answer(mine).reason) == (True, "filling")
    assert (other.answer(theirs).more, other.answer(theirs).reason) == (False, "filling")
    engine.workers[0].say(m.Filled(leases[:1], []))
    rig.settle()
    assert (len(engine.answer(mine).refs), engine.answer(mine).more) == (1, True)
    engine.workers[0].say(m.Filled([], leases[1:]))
    rig.settle()
    answer = engine.answer(mine)
    assert (len(answer.refs), answer.more, answer.reason) == (1, False, "never_seen")


def test_abandoned_leases_are_free_at_once(rig: Rig) -> None:
    engine, digests = joined(rig), chain(2)
    leases, _ = engine.reserve(digests)
    ticket = engine.ask(digests)
    rig.settle()
    engine.scheduler.say(m.Abandon([*leases, 12345]))
    rig.settle()
    assert engine.answer(ticket).more is False
    assert used_slots(rig) == 0
    engine.workers[0].say(m.Filled(leases, []))  # too late: not ours any more
    assert engine.found(digests) == 0


def test_a_prefix_is_spilled_from_its_head(rig: Rig) -> None:
    """What finds no room is refused with all that follows: a tail without its head is useless."""
    rig = make_rig(SLAB)
    engine, digests = joined(rig), chain(SLOTS + 4)
    leases, _ = engine.reserve(digests)
    assert [bool(n) for n in leases] == [True] * SLOTS + [False] * 4
    assert rig.hierarchy.stats()["spills_refused_no_room"] == 4


def test_nothing_is_granted_before_all_workers_have_mapped_it(rig: Rig) -> None:
    engine = FakeEngine(rig, TWO)
    rig.executor.drain()
    rig.turns()
    engine.scheduler.say(m.Reserve(1, 0, b"", chain(1)))
    rig.turns()
    assert not engine.scheduler.take(m.Granted)  # waits, rather than evicting or refusing
    for worker, granted in zip(engine.workers, (False, True), strict=True):
        worker.map()
        rig.turns()
        answers = engine.scheduler.take(m.Granted)
        assert [bool(a.leases[0]) for a in answers] == [True] * granted


def test_waiting_for_a_slab_ends(rig: Rig) -> None:
    """A worker that never maps its slab costs a block, not the session."""
    engine = FakeEngine(rig, TWO)
    rig.executor.drain()
    rig.turns()
    engine.scheduler.say(m.Reserve(1, 0, b"", chain(1)))
    rig.turns()
    rig.clock.advance(ROOM_WAIT_S)
    rig.turns()
    (answer,) = engine.scheduler.take(m.Granted)
    assert answer.leases == [0]


# recalls -------------------------------------------------------------------------------------------------------------


def test_pins_are_counted_once_a_block_and_end_with_each_request(rig: Rig) -> None:
    engine, digests = joined(rig), chain(4)
    engine.spill(digests)
    tickets = [engine.ask(digests) for _ in range(3)]
    rig.settle()
    assert rig.hierarchy.arena.pinned_bytes == 4 * SLOT
    engine.release(tickets[0])
    engine.release(tickets[0])
    transfer = engine.recall(tickets[1], 1, 2)
    rig.settle()
    assert rig.hierarchy.arena.pinned_bytes == 4 * SLOT
    engine.release(tickets[2])
    rig.settle()
    stats = rig.hierarchy.stats()
    assert (stats["pinned_bytes"], stats["leased_blocks"]) == (0, 2)
    engine.recalled(transfer)
    engine.recalled(transfer)
    rig.settle()
    assert rig.hierarchy.stats()["leased_blocks"] == 0


def test_a_recall_is_leased_until_every_rank_has_copied(rig: Rig) -> None:
    engine, digests = joined(rig, TWO), chain(1)
    engine.spill(digests)
    ticket = engine.ask(digests)
    rig.settle()
    transfer = engine.recall(ticket)
    engine.workers[0].say(m.Recalled([transfer, 999]))
    engine.workers[0].say(m.Recalled([transfer]))
    assert rig.hierarchy.stats()["leased_blocks"] == 1
    engine.workers[1].say(m.Recalled([transfer]))
    assert rig.hierarchy.stats()["leased_blocks"] == 0


def test_a_worker_may_have_copied_before_the_scheduler_said_so(rig: Rig) -> None:
    """They have sockets of their own, and nothing says whose message comes first."""
    engine, digests = joined(rig, TWO), chain(2)
    engine.spill(digests)
    tickets = [engine.ask(digests) for _ in range(2)]
    rig.settle()
    transfers = [engine.number() for _ in tickets]
    engine.workers[0].say(m.Recalled([*transfers, 999]))
    engine.workers[1].say(m.Recalled(transfers[:1]))
    for ticket, transfer in zip(tickets, transfers, strict=True):
        engine.scheduler.say(m.Recall(ticket, transfer, 0, 2))
    rig.settle()
    stats = rig.hierarchy.stats()
    assert (stats["pinned_bytes"], stats["leased_blocks"], stats["recalled_blocks"]) == (0, 2, 4)
    engine.workers[1].say(m.Recalled(transfers[1:]))
    assert rig.hierarchy.stats()["leased_blocks"] == 0
    for first in (1000, 1000 + MAX_EARLY):
        engine.workers[0].say(m.Recalled(list(range(first, first + MAX_EARLY))))
    (session,) = rig.hierarchy.registry.sessions.values()
    assert len(session.early) == MAX_EARLY


def test_what_is_pinned_or_leased_is_not_evicted() -> None:
    rig = make_rig(SLAB)
    engine, digests = joined(rig), chain(2)
    engine.spill(digests, word=5)
    pinned, leased = engine.ask(digests), engine.ask(at(digests, 0))
    rig.settle()
    refs = engine.answer(pinned).refs
    engine.recall(leased)
    engine.release(leased)
    for n in range(3):
        engine.spill(chain(SLOTS, 100 * n + 100), word=9)
    assert all(engine.workers[0].holds(row[0]) for row in refs)
    assert [read(engine.workers[0].slot(row[0]), 0) for row in refs] == [5, 5]
    assert int(rig.hierarchy.stats()["dropped_evicted"]) > 0
    engine.release(pinned)
    rig.settle()


def test_pins_are_bounded() -> None:
    rig = make_rig(3 * SLAB)  # 24 slots, 12 of which may be pinned
    engine = joined(rig)
    long, short = chain(14), chain(3, 500)
    for part in range(0, 14, 4):
        engine.spill(long[32 * part : 32 * part + 128], parent=at(long, part - 1) if part else b"")
    engine.spill(short)
    first = engine.ask(long)
    rig.settle()
    assert (len(engine.answer(first).refs), engine.answer(first).reason) == (12, "pins")
    assert not engine.answer(first).more, "all pins are its own: there is nothing to wait for"
    second = engine.ask(short)
    rig.settle()
    assert (len(engine.answer(second).refs), engine.answer(second).more) == (0, True)
    engine.release(first)
    rig.settle()
    assert (len(engine.answer(second).refs), engine.answer(second).more) == (3, False)
    third = engine.ask(long)
    rig.settle()
    assert len(engine.answer(third).refs) == 9
    engine.release(second)
    rig.settle()
    assert len(engine.answer(third).refs) == 12


def test_a_later_request_is_asked_to_give_way_to_an_earlier_one() -> None:
    rig = make_rig(3 * SLAB)
    engine = joined(rig)
    runs = [chain(8, 100 * n) for n in range(3)]
    for run in runs:
        engine.spill(run)
    late = engine.ask(runs[0], order=30)
    later = engine.ask(runs[1], order=40)
    rig.settle()
    assert [len(engine.answer(t).refs) for t in (late, later)] == [8, 4]
    assert engine.scheduler.take(m.GiveWay) == []  # an earlier one's pins are not asked for
    early = engine.ask(runs[2], order=-1)  # preempted
    rig.settle()
    asked = [g.ticket for g in engine.scheduler.take(m.GiveWay)]
    assert asked == [later]  # the last in line
    engine.release(later)
    rig.settle()
    assert [g.ticket for g in engine.scheduler.take(m.GiveWay)] == [late]
    assert len(engine.answer(early).refs) == 4
    engine.release(late)
    rig.settle()
    assert (len(engine.answer(early).refs), engine.answer(early).more) == (8, False)


def test_two_that_share_blocks_give_way_once_each() -> None:
    """What the one lets go of is not kept by the other, which would then be asked, and so on for ever."""
    rig = make_rig(3 * SLAB)
    engine = joined(rig)
    runs = [chain(8, 100), chain(10, 200)]
    for run in runs:
        engine.spill(run[: 8 * 32])
    engine.spill(runs[1][8 * 32 :], parent=at(runs[1], 7))
    longer, shorter = engine.ask(runs[0], order=30), engine.ask(runs[0][: 4 * 32], order=40)
    rig.settle()
    assert [len(engine.answer(t).refs) for t in (longer, shorter)] == [8, 4]
    early = engine.ask(runs[1], order=-1)
    asked = []
    for _ in range(6):
        rig.settle()
        for way in engine.scheduler.take(m.GiveWay):
            asked.append(way.ticket)
            engine.scheduler.say(m.Release(way.ticket, waits=True))
    assert asked == [longer, shorter]
    told = [found for found in engine.scheduler.take(m.Found) if found.ticket == early]
    assert sum(len(found.slots) for found in told) == 10 * m.SLOT_REF.itemsize and not told[-1].more
    engine.release(early)
    rig.settle()
    final = [found.ticket for found in engine.scheduler.take(m.Found) if not found.more]
    assert sorted(final) == [longer, shorter], "then it is their turn"


def test_a_long_answer_comes_in_slices_and_turns_stay_short() -> None:
    rig = make_rig()
    model = Model(shard_bytes=4096)
    engine, digests = joined(rig, model), chain(1000)
    for part in range(0, 1000, 250):
        leases, _ = engine.reserve(
            digests[32 * part : 32 * (part + 250)], parent=at(digests, part - 1) if part else b""
        )
        engine.workers[0].say(m.Filled(leases, []))
        rig.settle()
    ticket = engine.ask(digests)
    slices = 0
    while rig.hierarchy.turn():
        slices += 1
    assert slices >= 1000 // 128
    assert (len(engine.answer(ticket).refs), engine.answer(ticket).more) == (1000, False)


def test_a_released_ask_is_not_answered(rig: Rig) -> None:
    engine = joined(rig)
    ticket = engine.ask(chain(3))
    engine.release(ticket)
    rig.settle()
    assert engine.answer(ticket).more is None


def test_an_empty_ask(rig: Rig) -> None:
    engine = joined(rig)
    ticket = engine.ask(b"")
    rig.settle()
    assert (len(engine.answer(ticket).refs), engine.answer(ticket).more) == (0, False)


def test_a_miss_says_whether_it_was_evicted() -> None:
    rig = make_rig(SLAB)
    engine = joined(rig)
    old, new = chain(SLOTS), chain(SLOTS, 100)
    engine.spill(old)
    engine.spill(new)
    for digests, reason in ((old, "evicted"), (chain(1, 900), "never_seen")):
        ticket = engine.ask(digests)
        rig.settle()
        assert engine.answer(ticket).reason == reason
    assert rig.hierarchy.stats()["misses_evicted"] == SLOTS


def test_forgotten_blocks_are_gone_and_those_in_use_drain(rig: Rig) -> None:
    engine, digests = joined(rig), chain(2)
    engine.spill(digests)
    ticket = engine.ask(digests)
    rig.settle()
    transfer = engine.recall(ticket)
    engine.scheduler.say(m.Forget(0, at(digests, 0) + chain(1, 77)))
    rig.settle()
    assert rig.hierarchy.stats()["dropped_failed_check"] == 1
    assert engine.found(digests) == 0
    assert rig.hierarchy.arena.count()["leased_blocks"] == 2
    engine.recalled(transfer)
    assert used_slots(rig) == 1
    assert engine.spill(at(digests, 0)) == 1
    assert engine.found(digests) == 2


def test_what_waits_for_a_slab_that_is_retired_is_answered() -> None:
    rig = make_rig(SLAB)
    one, digests = joined(rig), chain(2)
    one.spill(digests)
    two = FakeEngine(rig, name="two")  # the same model; never maps
    ticket = two.ask(digests)
    rig.turns()
    assert (two.answer(ticket).more, two.answer(ticket).reason) == (True, "mapping")
    FakeEngine(rig, Model(weights=bytes(32)), name="three")  # has nothing to evict: gets the slab
    rig.turns()
    assert (two.answer(ticket).more, two.answer(ticket).reason) == (False, "evicted")
    assert len(one.workers[0].take(m.SlabRetired)) == 1


def test_an_engine_that_joins_a_full_well_gets_a_slab_without_asking() -> None:
    rig = make_rig(SLAB)
    joined(rig)
    late = joined(rig, Model(weights=bytes(32)), name="late")
    assert not late.workers[0].shared, "the other's slab is new"
    due = rig.hierarchy.next_moment
    assert due is not None
    rig.clock.advance(due - rig.clock.now())
    rig.settle()
    assert late.workers[0].shared
    assert rig.hierarchy.next_moment is None


def test_an_engine_that_has_gone_waits_for_no_slab() -> None:
    rig = make_rig(SLAB)
    one = joined(rig)
    late = joined(rig, Model(weights=bytes(32)), name="late")
    late.scheduler.leave()
    assert rig.hierarchy.next_moment is None
    rig.clock.advance(ROOM_WAIT_S)
    rig.settle()
    assert not one.workers[0].take(m.SlabRetired)


# ends of sessions ----------------------------------------------------------------------------------------------------


def test_a_lost_member_ends_the_session_for_all(rig: Rig) -> None:
    engine = joined(rig, TWO)
    engine.workers[1].leave()
    assert [member.gone for member in engine.members] == [True] * 3
    assert rig.hierarchy.sessions == 0


@pytest.mark.parametrize("lost", ["scheduler", "worker"])
def test_fills_are_quarantined_until_every_copier_has_exited(rig: Rig, lost: str) -> None:
    engine, digests = joined(rig, TWO), chain(2)
    leases, _ = engine.reserve(digests)
    engine.workers[0].say(m.Filled(leases[:1], []))
    (engine.scheduler if lost == "scheduler" else engine.workers[0]).leave()
    assert rig.hierarchy.arena.count()["quarantined_slots"] == 4
    engine.workers[0].exit()
    engine.scheduler.exit()
    assert rig.hierarchy.arena.count()["quarantined_slots"] == 4
    audit.hierarchy(rig.hierarchy)
    engine.workers[1].exit()
    assert rig.hierarchy.arena.count()["quarantined_slots"] == 0
    rig.settle()
    assert rig.hierarchy.arena.count()["free_slots"] == 2 * SLOTS


def test_time_alone_frees_nothing(rig: Rig) -> None:
    engine = joined(rig)
    engine.reserve(chain(2))
    engine.scheduler.leave()
    rig.clock.advance(1e9)
    rig.settle()
    assert rig.hierarchy.arena.count()["quarantined_slots"] == 2


def test_a_zombies_slot_is_not_reused() -> None:
    rig = make_rig(SLAB)
    engine, digests = joined(rig), chain(2)
    _, refs = engine.reserve(digests)
    engine.scheduler.leave()
    heir = joined(rig, name="heir")
    run = chain(SLOTS, 100)
    assert heir.spill(run, word=5) == SLOTS - 2
    for row in refs:
        write(engine.workers[0].slot(row[0]), 0, 666)  # it has not noticed yet
    ticket = heir.ask(run)
    rig.settle()
    answer = heir.answer(ticket)
    assert len(answer.refs) == 4  # what one request may pin
    assert [read(heir.workers[0].slot(row[0]), 0) for row in answer.refs] == [5] * 4
    engine.workers[0].exit()
    heir.release(ticket)
    assert heir.spill(chain(2, 300)) == 2


def test_a_zombies_reads_stay_leased(rig: Rig) -> None:
    rig = make_rig(SLAB)
    engine, digests = joined(rig), chain(2)
    engine.spill(digests, word=5)
    ticket = engine.ask(digests)
    rig.settle()
    refs = engine.answer(ticket).refs
    engine.recall(ticket)
    engine.workers[0].leave()
    heir = joined(rig, name="heir")
    heir.spill(chain(SLOTS, 100), word=9)
    stranger = FakeEngine(rig, Model(weights=bytes(32)), name="stranger")
    rig.settle()
    assert [read(engine.workers[0].slot(row[0]), 3) for row in refs] == [5, 5]
    assert all(engine.workers[0].holds(row[0]) for row in refs)
    assert not stranger.workers[0].shared
    engine.workers[0].exit()
    assert rig.hierarchy.arena.count()["leased_blocks"] == 0


def test_pins_of_a_lost_session_end_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "AT_ONCE", 1)
    engine, digests = joined(rig), chain(3)
    engine.spill(digests)
    engine.ask(digests)
    rig.settle()
    assert rig.hierarchy.arena.pinned_bytes
    engine.workers[0].leave()
    assert rig.hierarchy.arena.pinned_bytes == 0
    assert rig.hierarchy.stats()["quarantined_sessions"] == 0  # nobody can be copying: there is nothing to wait for


def test_a_turn_ends_when_its_time_is_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever pings waits for one turn; a slow machine, or work on cold memory, must not make it longer."""
    monkeypatch.setattr(session, "NAMED", 2)
    engine, digests = joined(rig), chain(SLOTS)
    engine.spill(digests)
    rig.settle()
    now, clock = rig.clock.now(), count()
    monkeypatch.setattr(rig.clock, "now", lambda: now + TURN_S / 3 * next(clock))
    engine.ask(digests)
    rig.hierarchy.turn()
    assert 0 < rig.hierarchy.arena.pins < SLOTS
    rig.turns()
    assert rig.hierarchy.arena.pins == SLOTS


def test_a_long_runs_pins_are_let_go_in_slices(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "AT_ONCE", 2)
    engine, digests = joined(rig), chain(3)
    engine.spill(digests)
    short, long = engine.ask(at(digests, 0)), engine.ask(digests)
    rig.settle()
    engine.release(short)
    assert rig.hierarchy.arena.pins == 3
    engine.release(long)
    assert rig.hierarchy.arena.pins == 3, "not within the message"
    audit.hierarchy(rig.hierarchy)
    rig.turns()
    assert rig.hierarchy.arena.pins == 0


def test_blocks_outlive_the_engine(rig: Rig) -> None:
    engine, digests = joined(rig), chain(3)
    engine.spill(digests)
    for member in engine.members:
        member.exit()
    assert joined(rig, name="next").found(digests) == 3


def test_rejoining_acknowledges_rank_by_rank(rig: Rig) -> None:
    engine = joined(rig, TWO)
    engine.reserve(chain(2))
    session = engine.session
    engine.workers[0].leave()
    assert rig.hierarchy.arena.count()["quarantined_slots"] == 4
    FakeMember(rig, engine.worker_hello(0, [session]))
    assert rig.hierarchy.arena.count()["quarantined_slots"] == 4
    FakeMember(rig, FakeEngine(rig, TWO, name="stranger").worker_hello(1, [session]))
    assert rig.hierarchy.arena.count()["quarantined_slots"] == 4  # another engine has no say
    FakeMember(rig, engine.worker_hello(1, [session + 1]))
    assert rig.hierarchy.arena.count()["quarantined_slots"] == 4
    rig.members[-1].leave()
    FakeMember(rig, engine.worker_hello(1, [session]))
    assert rig.hierarchy.arena.count()["quarantined_slots"] == 0
    rig.settle()


def test_an_acknowledgement_that_comes_before_the_end_of_the_old_connection(rig: Rig) -> None:
    """Two sockets have no order between them."""
    engine = joined(rig)
    engine.reserve(chain(2))
    again = FakeEngine(rig, engine.model, name=engine.name, acknowledges=[engine.session])
    assert not engine.live
    assert again.live
    rig.settle()
    assert rig.hierarchy.arena.count()["quarantined_slots"] == 0
    assert rig.hierarchy.sessions == 1
    assert again.spill(chain(2)) == 2


def test_two_sessions_of_one_engine_do_not_mix(rig: Rig) -> None:
    """An engine that rejoins before its loss was noticed gets a session of its own."""
    engine = joined(rig)
    again = joined(rig)
    assert engine.live and again.live
    assert engine.session != again.session
    engine.spill(chain(2))
    assert again.found(chain(2)) == 2


def test_close_frees_all_memory(rig: Rig) -> None:
    engine = joined(rig)
    engine.spill(chain(3))
    engine.reserve(chain(2, 50))
    rig.hierarchy.close()
    assert not engine.live
    assert all(shared.fd == -1 for shared in rig.memory.made)
    assert rig.hierarchy.slabs.bytes == 0


# who may join and say what -------------------------------------------------------------------------------------------


def refused(member: FakeMember) -> str:
    (answer,) = member.take(m.Refused)
    assert member.gone
    return answer.code


@pytest.mark.parametrize("protocol", [m.OLDEST_PROTOCOL - 1, m.PROTOCOL + 1])
def test_other_protocol_versions_are_refused(rig: Rig, protocol: int) -> None:
    hello = joined(rig).scheduler_hello(protocol)
    assert refused(FakeMember(rig, hello)) == "SW-801"


@pytest.mark.parametrize(
    "change",
    [
        {"role": "king"}, {"world": 0}, {"rank": 1}, {"rank": -1}, {"shard_bytes": 0}, {"shard_bytes": (1 << 30) + 1},
        {"engine": ""}, {"engine": "e" * 129}, {"layout": b"short"}, {"weights": b""}, {"model": b"m" * 33},
        {"block_tokens": 0},
    ],
)  # fmt: skip
def test_a_hello_that_makes_no_sense_is_refused(rig: Rig, change: dict[str, object]) -> None:
    import msgspec

    good = joined(rig).scheduler_hello()
    assert refused(FakeMember(rig, msgspec.structs.replace(good, **change))) == "SW-804"
    assert rig.hierarchy.sessions == 1


def test_a_worker_whose_exit_nobody_would_see_is_refused(rig: Rig) -> None:
    assert refused(FakeMember(rig, joined(rig).worker_hello(0), watched=False)) == "SW-805"


def test_a_second_member_in_one_place_is_refused(rig: Rig) -> None:
    engine = FakeEngine(rig, Model(world=2))
    again = [FakeMember(rig, engine.worker_hello(0)), FakeMember(rig, engine.worker_hello(0))]
    assert not again[0].gone  # of the next session
    assert refused(again[1]) == "SW-404"
    assert engine.live


def test_what_a_worker_has_not_mapped_is_not_offered_to_it(rig: Rig) -> None:
    first = joined(rig)
    assert first.spill(chain(2)) == 2
    second = FakeEngine(rig, name="second")
    ticket = second.ask(chain(2))
    rig.turns()
    answer = second.answer(ticket)
    assert (len(answer.refs), answer.more, answer.reason) == (0, True, "mapping")
    rig.settle()
    assert len(second.answer(ticket).refs) == 2


def test_a_second_scheduler_is_refused(rig: Rig) -> None:
    engine = FakeEngine.__new__(FakeEngine)
    engine.model, engine.name = Model(), "engine"
    first, second = (FakeMember(rig, engine.scheduler_hello()) for _ in range(2))
    assert refused(second) == "SW-404"
    assert not first.gone
    FakeMember(rig, engine.worker_hello(0))
    assert first.take(m.Ready)


def test_a_slab_is_not_mapped_by_who_is_not_its_owner(rig: Rig) -> None:
    ours, theirs = joined(rig), FakeEngine(rig, Model(weights=b"x" * 32), name="other")
    rig.settle()
    (number, *_) = ours.workers[0].shared
    before = set(rig.hierarchy.slabs.slabs[number].mapped)
    assert before
    theirs.workers[0].say(m.Mapped(number))
    theirs.workers[0].say(m.Mapped(1 << 31))
    assert rig.hierarchy.slabs.slabs[number].mapped == before
    assert theirs.live


@pytest.mark.parametrize(
    "other", [Model(world=2, shard_bytes=SLOT + 4096), Model(world=1), Model(world=3)], ids=["bytes", "fewer", "more"]
)
def test_members_that_describe_different_things_get_no_session(rig: Rig, other: Model) -> None:
    engine = FakeEngine.__new__(FakeEngine)
    engine.model, engine.name = Model(world=2), "engine"
    members = [FakeMember(rig, engine.worker_hello(rank)) for rank in (0, 1)]
    engine.model = other
    scheduler = FakeMember(rig, engine.scheduler_hello())
    if other.world == 3:  # one is still to come, and it is the wrong one
        engine.model = Model(world=3)
        scheduler = FakeMember(rig, engine.worker_hello(2))
    assert refused(scheduler) == "SW-401"
    assert all(member.gone for member in members)
    assert rig.hierarchy.sessions == 0
    assert rig.hierarchy.stats()["quarantined_sessions"] == 0


def test_a_shard_that_no_slab_can_hold_is_refused_and_all_are_told(rig: Rig) -> None:
    engine = FakeEngine.__new__(FakeEngine)
    engine.model, engine.name = Model(shard_bytes=1 << 30), "engine"
    worker = FakeMember(rig, engine.worker_hello(0))
    scheduler = FakeMember(rig, engine.scheduler_hello())
    assert refused(scheduler) == "SW-107"
    assert refused(worker) == "SW-107"
    assert rig.hierarchy.sessions == 0


MISUSE: dict[str, tuple[str, m.FromEngine]] = {
    "a worker asks": ("worker", m.Ask(1, 0, 0, bytes(32))),
    "a worker reserves": ("worker", m.Reserve(1, 0, b"", bytes(32))),
    "a scheduler fills": ("scheduler", m.Filled([1], [])),
    "a scheduler maps": ("scheduler", m.Mapped(1)),
    "a second hello": ("scheduler", m.Hello(m.PROTOCOL, "scheduler")),
    "half a digest": ("scheduler", m.Ask(1, 0, 0, bytes(33))),
    "half a digest to fill": ("scheduler", m.Reserve(1, 0, b"", bytes(31))),
    "too many to fill": ("scheduler", m.Reserve(1, 0, b"", bytes(32 * (MAX_RESERVE + 1)))),
    "too long an ask": ("scheduler", m.Ask(1, 0, 0, bytes(32 * (m.MAX_DIGESTS + 1)))),
    "a worker looks": ("worker", m.Look(1, 0, bytes(32))),
    "half a digest to look for": ("scheduler", m.Look(1, 0, bytes(33))),
    "too long a look": ("scheduler", m.Look(1, 0, bytes(32 * (m.MAX_DIGESTS + 1)))),
    "a stop": ("worker", m.Stop()),
    "a recall of what cannot be": ("scheduler", m.Recall(1, 1, -1, 2)),
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_ends_the_session_and_harms_no_other(rig: Rig, case: str) -> None:
    other = joined(rig, name="other")
    other.spill(chain(2))
    engine = joined(rig)
    role, message = MISUSE[case]
    guilty = engine.scheduler if role == "scheduler" else engine.workers[0]
    guilty.say(message)
    assert guilty.take(m.Refused)[0].code == ("SW-802" if m.overlong(message) else "SW-804")
    assert [member.gone for member in engine.members] == [True, True]
    rig.settle()
    assert other.found(chain(2)) == 2


def test_numbers_that_are_used_twice_end_the_session(rig: Rig) -> None:
    engine, digests = joined(rig), chain(2)
    engine.spill(digests)
    ticket = engine.ask(digests)
    rig.settle()
    transfer = engine.recall(ticket)
    again = engine.ask(digests)
    rig.settle()
    engine.scheduler.say(m.Recall(again, transfer, 0, 2))
    assert not engine.live
    engine.workers[0].exit()
    rig.settle()
    assert rig.hierarchy.stats()["leased_blocks"] == 0
    twice = joined(rig)
    twice.scheduler.say(m.Ask(5, 0, 0, digests))
    twice.scheduler.say(m.Ask(5, 0, 0, digests))
    assert not twice.live
    rig.settle()


def test_waiting_requests_are_bounded(rig: Rig) -> None:
    engine = joined(rig)
    for _ in range(MAX_REQUESTS):
        engine.ask(b"")
    assert engine.live
    engine.ask(b"")
    assert not engine.live
    rig.settle()


def test_recalls_under_way_are_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MAX_REQUESTS", 3)
    engine, digests = joined(rig), chain(2)
    engine.spill(digests)
    for n in range(4):
        ticket = engine.ask(digests)
        rig.settle()
        assert engine.live
        engine.recall(ticket)
        assert engine.live == (n < 3)
    engine.workers[0].exit()
    rig.settle()


def test_names_of_few_epochs_are_kept_at_hand(rig: Rig) -> None:
    engine = joined(rig)
    for epoch in range(20):
        engine.found(chain(1), epoch=epoch)
    (session,) = rig.hierarchy.registry.sessions.values()
    assert session.keyed is not None and len(session.keyed.known) == EPOCHS_KEPT


def test_sessions_are_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_SESSIONS", 2)
    engines = [FakeEngine(rig, name=name) for name in ("one", "two", "three")]
    assert [engine.live for engine in engines] == [True, True, False]
    assert {refused.code for member in engines[2].members for refused in member.take(m.Refused)} == {"SW-204"}
    engines[0].scheduler.leave()
    assert FakeEngine(rig, name="four").live
    rig.settle()


def test_nothing_is_asked_before_the_session_is_complete(rig: Rig) -> None:
    engine = FakeEngine.__new__(FakeEngine)
    engine.model, engine.name = Model(), "engine"
    scheduler = FakeMember(rig, engine.scheduler_hello())
    assert scheduler.take(m.Welcome)
    assert not scheduler.take(m.Ready)
    scheduler.say(m.Report({"early": 1}))
    assert not scheduler.gone
    scheduler.say(m.Ask(1, 0, 0, bytes(32)))
    assert scheduler.gone


def test_reports_are_bounded_and_only_grow(rig: Rig) -> None:
    engine = joined(rig)
    names = [f"kind_{a}{b}" for a in "abcdefghij" for b in "abcdefghij"]
    for name in names:
        engine.scheduler.say(m.Report({name: 2, "known": -5}))
    engine.scheduler.say(m.Report({names[0]: 3}))
    counted = {k: v for k, v in rig.hierarchy.stats().items() if k.startswith("engine_")}
    assert len(counted) == 64
    assert counted["engine_kind_aa"] == 5
    assert all(int(v) >= 0 for v in counted.values())


def test_reports_carry_no_text_into_what_is_shown(rig: Rig) -> None:
    engine = joined(rig)
    for name in ("31337 31338", "deadbeef01", "a" * 49, "Prompt", "a\nb", ""):
        engine.scheduler.say(m.Report({name: 1}))
    assert not [name for name in rig.hierarchy.stats() if name.startswith("engine_")]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("Llama-3-8B", "Llama-3-8B"),
        ("/home/alice/models/secret/", "secret"),
        ("a\nb\x1b[31m", "a?b?[31m"),
        ("x" * 100, "x" * 64),
        ("", ""),
    ],
)
def test_a_label_is_fit_for_a_log_and_tells_no_path(rig: Rig, said: str, shown: str) -> None:
    events: list[e.Event] = []
    rig.hierarchy._sink = events.append
    engine = FakeEngine.__new__(FakeEngine)
    engine.model, engine.name = Model(), "engine"
    scheduler = FakeMember(rig, msgspec.structs.replace(engine.scheduler_hello(), label=said))
    FakeMember(rig, engine.worker_hello(0))
    rig.turns()
    assert not scheduler.gone
    assert [event.label for event in events if isinstance(event, e.SessionOpened)] == [shown]


# identity ------------------------------------------------------------------------------------------------------------

STRANGERS = {
    "weights": Model(weights=b"x" * 32),
    "model": Model(model=b"x" * 32),
    "layout": Model(layout=b"x" * 32),
    "block tokens": Model(block_tokens=256),
    "ranks": Model(world=2),
    "shard bytes": Model(shard_bytes=SLOT - 8),  # the same slots
}


@pytest.mark.parametrize("field", STRANGERS)
def test_another_identity_finds_nothing(field: str) -> None:
    rig = make_rig(4 * SLAB)
    engine, digests = joined(rig), chain(3)
    engine.spill(digests)
    stranger = joined(rig, STRANGERS[field], "stranger")
    assert stranger.found(digests) == 0
    assert stranger.reserve(digests)[0].count(0) == 0  # and does not see that they are here
    assert not set(stranger.workers[0].shared) & set(engine.workers[0].shared)
    assert joined(rig, name="twin").found(digests) == 3


def test_weights_epochs_do_not_meet(rig: Rig) -> None:
    engine, digests = joined(rig), chain(2)
    engine.spill(digests, epoch=0)
    assert [engine.found(digests, epoch=n) for n in (0, 1, 2**64 - 1)] == [2, 0, 0]
    assert engine.spill(digests, epoch=9) == 2
    for epoch in range(20, 30):  # names of few epochs are kept at hand; the others are made again
        assert engine.found(digests, epoch=epoch) == 0
    assert [engine.found(digests, epoch=n) for n in (0, 9)] == [2, 2]


def _keys(*keys: bytes) -> Keyring:
    epochs = tuple(Epoch(len(keys) - n, key) for n, key in enumerate(keys))
    return Keyring((TenantKeys(DEFAULT_TENANT, epochs),))


def test_other_keys_give_other_names() -> None:
    ids = []
    for key in (b"a" * 32, b"b" * 32):
        rig = make_rig(keyring=_keys(key))
        joined(rig).spill(chain(3))
        ids.append(set(rig.hierarchy.index))
    assert len(ids[0]) == len(ids[1]) == 3
    assert not ids[0] & ids[1]
    assert not ids[0] & {at(chain(3), n) for n in range(3)}


def test_blocks_of_an_older_key_epoch_are_found_and_new_ones_get_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(keyring=_keys(b"a" * 32))
    engine, digests = joined(rig), chain(4)
    engine.spill(digests[:64])
    rotated_keys = Sealing(_keys(b"b" * 32, b"a" * 32), sealed=True, wall=lambda: 0.0)
    monkeypatch.setattr(rig.hierarchy.registry, "_sealing", rotated_keys)
    rotated = joined(rig, name="rotated")
    assert rotated.found(digests) == 2
    rotated.spill(digests[64:], parent=at(digests, 1))
    assert rotated.found(digests) == 4
    assert engine.found(digests) == 2  # knows the old key only
    rotated.scheduler.say(m.Forget(0, at(digests, 0)))
    assert rotated.found(digests) == 0


def test_no_digest_is_kept_or_shown(rig: Rig) -> None:
    engine, digests = joined(rig), chain(3)
    engine.spill(digests)
    assert not {at(digests, n) for n in range(3)} & set(rig.hierarchy.index)
    shown = repr(rig.hierarchy.stats())
    assert all(at(digests, n).hex() not in shown for n in range(3))
    assert blake3(digests).hexdigest() not in shown


def test_the_clock_is_the_one_that_was_given(rig: Rig) -> None:
    clock: Clock = rig.clock
    before = clock.now()
    rig.clock.advance(12.5)
    assert rig.hierarchy.stats()["uptime_s"] == 12.5
    assert clock.now() == before + 12.5


def test_however_small_the_share_for_pins_one_block_is_recalled() -> None:
    rig = make_rig()
    engine = joined(rig)
    engine.spill(chain(3))
    rig.hierarchy._recalls.pins.follow(0.001)
    assert engine.found(chain(3)) == 1
