"""Which blocks are there: what the well says to `Look`, and that it neither holds nor moves anything for it."""

from __future__ import annotations

import pytest
from deep import HUNG, TWO, DeepRig, at, chain, fill, written

from lab.rig.members import FakeEngine, Model, Rig
from stepwell.hierarchy.levels.breaker import OVERDUE_S
from stepwell.hierarchy.saved import PauseRecord
from stepwell.hierarchy.sessions import shares
from stepwell.hierarchy.sessions.shares import OVERHEAD
from stepwell.hierarchy.work import TURN_BLOCKS
from stepwell.protocol import messages as m
from stepwell.testing.arena_kit import SLAB
from stepwell.vault.keyring import Epoch, Keyring, TenantKeys


def post(engine: FakeEngine, digests: bytes, epoch: int = 0) -> int:
    ticket = engine.number()
    engine.scheduler.say(m.Look(ticket, epoch, digests))
    return ticket


def seen(engine: FakeEngine, digests: bytes, epoch: int = 0) -> list[int]:
    """What the well says before time passes or a job runs."""
    held = engine.rig.hierarchy.held.by_tenant.copy()
    ticket = post(engine, digests, epoch)
    engine.rig.turns()
    (answer,) = engine.scheduler.take(m.Seen)
    assert answer.ticket == ticket and engine.rig.hierarchy.held.by_tenant == held
    return list(answer.here)


def pause(rig: Rig) -> None:
    rig.hierarchy.operator.pause(PauseRecord("recalls", 1.8e9, 1000, "a test"))


@pytest.mark.parametrize("model", [Model(), TWO])
def test_blocks_in_host_memory_and_in_a_tier_are_seen_wherever_they_stand_and_others_are_not(model: Model) -> None:
    rig = DeepRig(3)
    fill(rig.join(model), chain(3))
    rig.settle()
    rig = rig.next_life(3)
    engine, digests = rig.join(model), chain(9)
    assert engine.spill(digests[32 * 5 : 32 * 7]) == 2
    leases, _ = engine.reserve(at(digests, 8))
    assert all(leases), "it is being filled"
    assert seen(engine, digests) == [1, 1, 1, 0, 0, 1, 1, 0, 0]
    assert seen(engine, at(digests, 6) + at(digests, 4) + at(digests, 0)) == [1, 0, 1]
    assert seen(engine, b"") == []


def test_a_look_holds_promotes_and_notes_nothing() -> None:
    rig = written(3, 4)
    engine = rig.join()
    fill(engine, chain(2, 100))
    rig.settle()
    before = {id: (entry.pins, entry.history.uses) for id, entry in rig.hierarchy.index.items()}
    read, uses, events = len(rig.asked), rig.hierarchy.stats(), rig.hierarchy.arena.sums
    assert seen(engine, chain(4) + chain(2, 100)) == [1] * 6
    rig.settle()
    assert before == {id: (entry.pins, entry.history.uses) for id, entry in rig.hierarchy.index.items()}
    assert len(rig.asked) == read and rig.hierarchy.arena.sums == events
    assert rig.hierarchy.stats() == uses


def test_what_is_being_promoted_is_seen_until_its_tier_is_down() -> None:
    rig = written(3, 4)
    engine, digests = rig.join(), chain(4)
    rig.faulty.faults = HUNG
    engine.ask(at(digests, 0))
    rig.turns()
    assert len(rig.hierarchy.index) == 1
    assert seen(engine, digests) == [1, 1, 1, 1]
    rig.clock.advance(OVERDUE_S)
    assert rig.stat("dict_reads_up") == 0
    assert seen(engine, digests) == [0, 0, 0, 0]
    assert engine.spill(chain(1, 100)) == 1
    assert seen(engine, chain(1, 100)) == [1], "host memory needs no tier"
    rig.faulty.release()
    rig.settle()


def test_what_another_session_fills_is_not_seen_though_a_tier_has_it() -> None:
    """As a request that asks for it would not get it."""
    rig = written(2, 2)
    one, two = rig.join(), rig.join(name="two")
    leases, _ = one.reserve(chain(2))
    assert all(leases)
    assert seen(two, chain(2)) == [0, 0]
    one.workers[0].say(m.Filled(leases, []))
    assert seen(two, chain(2)) == [1, 1]


def test_no_other_tenant_weights_or_epoch_is_seen() -> None:
    rig = Rig(16 * SLAB, seed=1, keyring=Keyring.ephemeral(("default", "a", "b")), tenants=2)
    a, b = (FakeEngine(rig, name="same", tenant=tenant) for tenant in "ab")
    other = FakeEngine(rig, Model(weights=b"v" * 32), name="other", tenant="a")
    rig.settle()
    assert a.spill(chain(2), epoch=5) == 2
    assert seen(a, chain(2), epoch=5) == [1, 1]
    assert [seen(a, chain(2)), seen(b, chain(2), epoch=5), seen(other, chain(2), epoch=5)] == [[0, 0]] * 3


def test_blocks_under_an_earlier_key_of_the_tenant_are_seen() -> None:
    def keys(*names: bytes) -> Keyring:
        return Keyring((TenantKeys("default", tuple(Epoch(len(names) - n, key) for n, key in enumerate(names))),))

    rig = DeepRig(keyring=keys(b"a" * 32))
    fill(rig.join(), chain(2))
    rig.settle()
    engine = rig.next_life(keyring=keys(b"b" * 32, b"a" * 32)).join()
    assert engine.spill(chain(1, 100)) == 1
    assert seen(engine, chain(2) + chain(2, 100)) == [1, 1, 1, 0]


def test_nothing_is_seen_while_recalls_are_paused() -> None:
    """Nor where the pause comes before a long answer is complete."""
    rig = Rig(4 * SLAB, seed=1)
    engine, digests = FakeEngine(rig), chain(3 * TURN_BLOCKS)
    rig.settle()
    assert engine.spill(digests[:64]) == 2
    ticket = post(engine, digests)
    rig.hierarchy.turn()
    assert not engine.scheduler.take(m.Seen), "it goes on in the next turn"
    pause(rig)
    rig.turns()
    assert engine.scheduler.take(m.Seen) == [m.Seen(ticket, bytes(3 * TURN_BLOCKS))]
    assert seen(engine, digests[:64]) == [0, 0]
    rig.hierarchy.operator.resume("recalls", 1000)
    assert seen(engine, digests[:64]) == [1, 1]


def test_nothing_of_a_namespace_in_quarantine_is_seen() -> None:
    rig = Rig(4 * SLAB, seed=1)
    engine, other = FakeEngine(rig), FakeEngine(rig, Model(weights=b"v" * 32), name="other")
    rig.settle()
    assert engine.spill(chain(2)) == other.spill(chain(2)) == 2
    post(engine, chain(2))
    for _ in range(2):
        engine.scheduler.say(m.Canary(0, "bfloat16", [9.0]))
    rig.hierarchy._core.work.turn()
    assert [list(answer.here) for answer in engine.scheduler.take(m.Seen)] == [[0, 0]]
    assert seen(other, chain(2)) == [1, 1]


def test_what_looks_may_wait_is_bounded_and_more_is_told_nothing_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(4 * SLAB, seed=1)
    engine, digests = FakeEngine(rig), chain(2)
    rig.settle()
    engine.spill(digests)
    monkeypatch.setattr(shares, "MAX_HELD_BY_ONE", 2 * (len(digests) + OVERHEAD))
    tickets = [post(engine, digests) for _ in range(3)]
    assert engine.scheduler.take(m.Seen) == [m.Seen(tickets[2], bytes(2))], "at once"
    rig.turns()
    assert engine.scheduler.take(m.Seen) == [m.Seen(ticket, b"\1\1") for ticket in tickets[:2]]
    assert not rig.hierarchy.held.by_tenant and engine.live


@pytest.mark.parametrize("blocks", [0, 1, TURN_BLOCKS])
def test_a_session_that_has_ended_is_not_answered(blocks: int) -> None:
    rig = Rig(4 * SLAB, seed=1)
    engine = FakeEngine(rig)
    rig.settle()
    post(engine, bytes(32 * blocks))
    if blocks == TURN_BLOCKS:
        rig.hierarchy.turn()
        assert not rig.hierarchy.idle, "all was looked for, and it is not told yet"
    engine.workers[0].leave()
    assert engine.scheduler.gone
    rig.settle()
    assert not engine.scheduler.take(m.Seen) and not rig.hierarchy.held.by_tenant


def test_a_session_that_has_ended_is_not_looked_for() -> None:
    rig = Rig(4 * SLAB, seed=1)
    engine = FakeEngine(rig)
    rig.settle()
    post(engine, bytes(32 * 10 * TURN_BLOCKS))
    rig.hierarchy.turn()
    engine.workers[0].leave()
    rig.hierarchy.turn()
    assert rig.hierarchy.idle
