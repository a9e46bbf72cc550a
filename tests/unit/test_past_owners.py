"""Engines with new weights come and go, each of them an owner: nothing of them grows without bound."""

from __future__ import annotations

import pytest
from deep import chain

from lab.rig.members import FakeEngine, Model, Rig
from stepwell.errors import IntegrityError
from stepwell.hierarchy import audit
from stepwell.hierarchy.arena import arena, past_owners
from stepwell.hierarchy.arena.past_owners import most_of_all
from stepwell.policies.past import MIN_REMEMBERED
from stepwell.testing.arena_kit import SLAB

FEW = 14
"""Blocks of the past that all owners may remember, in place of 65,536."""


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(past_owners, "most_of_all", lambda host_bytes: FEW)
    monkeypatch.setattr(past_owners, "A_FEW", 4)
    monkeypatch.setattr(arena, "A_FEW", 8)
    monkeypatch.setattr(past_owners, "MAX_PAST_OWNERS", 3)
    return Rig(2 * SLAB, seed=1)


def model(n: int) -> Model:
    return Model(weights=bytes([n // 256, n % 256]) * 16)


def visit(rig: Rig, n: int) -> None:
    """An engine with these weights comes, spills something and is gone; its slab is taken from it later."""
    engine = FakeEngine(rig, model(n), name=f"engine {n}")
    rig.settle()
    engine.spill(chain(3, 100 * n))
    rig.settle()
    rig.clock.advance(2.0)
    for member in engine.members:
        member.exit()
    rig.settle()


def test_engines_with_new_weights_that_come_and_go_leave_nothing_that_grows(rig: Rig) -> None:
    books = rig.hierarchy.arena
    for n in range(60):
        visit(rig, n)
        assert len(books.holdings) <= len(rig.hierarchy.slabs.slabs) <= 2
        assert len(books.past_owners) <= 3
        assert books.tally.blocks <= FEW
        known = sum(len(h.residents._histories) for h in books.holdings.values())
        known += sum(len(residents._histories) for _, residents in books.past_owners.items())
        assert known <= FEW + books.sums.blocks
    assert not rig.hierarchy.registry.sessions and not rig.hierarchy.registry.quarantines


def test_an_owner_that_has_gone_with_nothing_to_remember_is_forgotten_at_once(rig: Rig) -> None:
    for n in range(4):
        engine = FakeEngine(rig, model(n), name=f"engine {n}")
        for member in engine.members:
            member.exit()
        rig.settle()
    assert len(rig.hierarchy.arena.holdings) <= 2
    assert len(rig.hierarchy.arena.past_owners) == 0


def test_an_engine_that_is_started_again_finds_its_policy_as_it_was(rig: Rig) -> None:
    """Its slabs went to others meanwhile."""
    books = rig.hierarchy.arena
    for n in range(4):
        visit(rig, n)
    (owner, residents), *_ = books.past_owners.items()
    histories = dict(residents._histories)
    assert len(histories) == 3
    again = FakeEngine(rig, model(0), name="engine 0")
    assert again.scheduler.member is not None and again.scheduler.member.session.owner == owner
    assert books.holdings[owner].residents is residents
    for id, history in histories.items():
        assert books.known(owner, id) is history and history.uses == 1


def test_who_has_gone_is_forgotten_before_who_is_there(rig: Rig) -> None:
    books = rig.hierarchy.arena
    for n in range(4):
        visit(rig, n)
    assert len(books.past_owners) >= 2
    engine = FakeEngine(rig, model(9), name="stays")
    rig.settle()
    for n in range(60):
        engine.spill(chain(1, 10_000 + n))
        rig.settle()
    assert FEW / 2 < books.tally.blocks <= FEW
    assert len(books.past_owners) == 0
    (mine,) = [holding for holding in books.holdings.values() if holding.present]
    assert mine.residents.remembered > FEW / 2


def test_who_remembers_most_forgets_first(rig: Rig) -> None:
    """So no engine has another's past forgotten by asking for much."""
    engines = [FakeEngine(rig, model(n), name=f"engine {n}") for n in range(2)]
    rig.settle()
    engines[0].reserve(chain(10))
    for n in range(30):
        engines[1].reserve(chain(8, 100 * n + 100))
        rig.settle()
    counts = [holding.residents.remembered for holding in rig.hierarchy.arena.holdings.values()]
    assert sum(counts) <= FEW and min(counts) > 0


def test_the_bound_follows_host() -> None:
    assert most_of_all(0) == most_of_all(64 << 20) == MIN_REMEMBERED
    assert most_of_all(16 << 30) * 300 <= (16 << 30) / 64
    assert most_of_all(1 << 50) == 1 << 22


def test_the_books_show_an_owner_that_is_kept_for_nothing(rig: Rig) -> None:
    books = rig.hierarchy.arena
    engine = FakeEngine(rig, model(1))
    rig.settle()
    holding = books.holdings[next(iter(books.holdings))]
    holding.present = False
    with pytest.raises(IntegrityError, match="engines connected"):
        audit.hierarchy(rig.hierarchy)
    slabs, holding.slabs, holding.free = holding.slabs, [], 0
    with pytest.raises(IntegrityError, match="neither engines nor slabs"):
        audit.arena(books, rig.hierarchy.slabs)
    holding.slabs, holding.present, holding.free = slabs, True, sum(len(slab.free) for slab in slabs)
    books.tally.blocks += 1
    with pytest.raises(IntegrityError, match="blocks remembered"):
        audit.arena(books, rig.hierarchy.slabs)
    books.tally.blocks -= 1
    audit.hierarchy(rig.hierarchy)
    assert engine.live
