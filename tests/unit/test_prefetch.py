"""Conversations that go on at regular times, in a well over a tier that can be broken, on a clock that is set."""

from __future__ import annotations

import pytest
from deep import HEALTHY, HUNG, TWO, DeepRig, at, chain, fill, told

from lab.rig.members import FakeEngine, Model
from stepwell.hierarchy import audit
from stepwell.hierarchy.levels import prefetch as p
from stepwell.policies.prefetch import record
from stepwell.policies.prefetch.record import MIN_GUESSES
from stepwell.protocol import messages as m
from stepwell.testing.arena_kit import SLOT
from stepwell.tiers.faulty import TierFaults

GAP_S = 20.0
TURNS = 4
STEP = 2  # blocks that each turn adds
WHOLE = TURNS * STEP
BYTES_S = 1e9
SLABS = 40  # so that guesses may hold more than a conversation


def quick(rig: DeepRig) -> None:
    """The tier's speed is known."""
    for n in range(1, 9):
        rig.level.reads.speed.read(n << 20, (n << 20) / BYTES_S, 1.0)


def pass_time(rig: DeepRig, seconds: float, step: float = 0.1) -> None:
    """With all that a well does when it is woken."""
    until = rig.clock.now() + seconds
    while rig.clock.now() < until:
        rig.clock.advance(min(step, until - rig.clock.now()))
        for _ in range(4):
            rig.hierarchy.turn()
            rig.settle(check=False)
    audit.hierarchy(rig.hierarchy)


def talk(rig: DeepRig, engine: FakeEngine, start: int = 0, turns: int = TURNS, gap: float = GAP_S) -> bytes:
    """A conversation; GAP_S before its next turn. Its blocks."""
    digests = chain(WHOLE, start)
    for turn in range(turns):
        prompt = digests[: 32 * STEP * (turn + 1)]
        engine.release(engine.ask(prompt))
        rig.settle()
        fill(engine, prompt[-32 * STEP :], parent=prompt[-32 * STEP - 32 : -32 * STEP], word=100 + STEP * turn)
        rig.settle()
        if turn < turns - 1:
            pass_time(rig, gap, gap)
    return digests[: 32 * STEP * turns]


def forgotten(rig: DeepRig) -> None:
    """By host memory."""
    rig.hierarchy.operator.clear(frozenset({"host"}), b"", lambda sums: None)
    rig.settle()
    assert not rig.hierarchy.index


def there(rig: DeepRig, engine: FakeEngine, digests: bytes) -> int:
    """How many of the blocks are in host memory."""
    return sum(rig.name(engine, at(digests, n)) in rig.hierarchy.index for n in range(len(digests) // 32))


def made(slabs: int = SLABS, **changes) -> DeepRig:  # type: ignore[no-untyped-def]
    rig = DeepRig(slabs, prefetch=True, **changes)
    quick(rig)
    return rig


@pytest.mark.parametrize("model", [Model(), TWO], ids=["one rank", "two ranks"])
def test_blocks_of_the_next_turn_are_there_before_it_comes(model: Model) -> None:
    rig = made()
    engine = rig.join(model)
    digests = talk(rig, engine)
    forgotten(rig)
    pass_time(rig, GAP_S / 2)
    assert there(rig, engine, digests) == 0, "not so early"
    pass_time(rig, GAP_S / 2)
    assert there(rig, engine, digests) == WHOLE
    assert [id for call in rig.asked for id in call] == [rig.name(engine, at(digests, n)) for n in range(WHOLE)]
    ticket = engine.ask(digests)
    rig.settle()
    assert told(engine, engine.answer(ticket).refs) == list(range(100, 100 + WHOLE))
    assert rig.stat("hits_staged") == 0
    assert rig.stat("dict_prefetched_blocks") == WHOLE
    engine.release(ticket)
    pass_time(rig, 2 * GAP_S, GAP_S)
    assert (rig.stat("prefetches_used"), rig.stat("prefetches_unused")) == (WHOLE, 0)
    assert there(rig, engine, digests) == WHOLE, "used: it stays"


def test_without_it_they_are_staged_when_the_turn_comes() -> None:
    rig = DeepRig(SLABS)
    quick(rig)
    engine = rig.join()
    digests = talk(rig, engine)
    forgotten(rig)
    pass_time(rig, GAP_S)
    assert there(rig, engine, digests) == 0
    assert engine.found(digests) == WHOLE
    assert rig.stat("hits_staged") == WHOLE


def test_the_well_is_woken_when_a_turn_is_due() -> None:
    rig = made()
    engine = rig.join()
    talk(rig, engine)
    forgotten(rig)
    due = rig.hierarchy.next_moment
    assert due is not None and GAP_S / 2 < due - rig.clock.now() < GAP_S
    rig.clock.advance(due - rig.clock.now())
    rig.turns()
    rig.turns()
    assert rig.level.reads.promoting


def test_what_nobody_used_gives_its_place_back_and_is_counted() -> None:
    rig = made()
    engine = rig.join()
    digests = talk(rig, engine)
    forgotten(rig)
    pass_time(rig, GAP_S)
    assert rig.hierarchy.migration.prefetch is not None and rig.hierarchy.migration.prefetch.held_bytes == WHOLE * SLOT
    pass_time(rig, GAP_S, 1.0)
    assert (rig.stat("prefetches_used"), rig.stat("prefetches_unused")) == (0, WHOLE)
    assert (
        rig.stat("dropped_unused") == WHOLE and rig.stat("blocks") == rig.hierarchy.migration.prefetch.held_bytes == 0
    )
    assert engine.found(digests) == WHOLE, "it lies below as it did"


def test_guesses_hold_only_a_share_of_host_memory() -> None:
    rig = made(WHOLE)  # of which a sixteenth is half of a slab
    engine = rig.join()
    digests = talk(rig, engine)
    forgotten(rig)
    pass_time(rig, GAP_S)
    held = there(rig, engine, digests)
    assert held == rig.hierarchy.limits.host_bytes // p.HOST_SHARE // SLOT
    assert 0 < held < WHOLE
    assert engine.found(digests) == WHOLE
    assert rig.stat("hits_staged") == WHOLE - held, "the beginning of it was there"


def test_guesses_have_only_a_share_of_what_the_tier_brings() -> None:
    rig = made()
    for n in range(1, 65):
        rig.level.reads.speed.read(n << 20, (n << 20) / 1e7, 1.0)  # ten megabytes a second
    engine = rig.join()
    talk(rig, engine)
    forgotten(rig)
    began: float | None = None
    while rig.stat("dict_prefetched_blocks") < WHOLE:
        pass_time(rig, 0.02, 0.02)
        if began is None and rig.stat("dict_prefetched_blocks"):
            began = rig.clock.now()
        if began is not None:
            asked = rig.stat("dict_prefetched_blocks") * SLOT
            assert asked <= p.BATCH_BYTES + SLOT + (rig.clock.now() - began) * p.SPEED_SHARE * 1.2e7


def test_nothing_is_guessed_while_a_request_waits_for_the_tier() -> None:
    rig = made()
    engine = rig.join()
    other = chain(2, 900)
    fill(engine, other)
    talk(rig, engine)
    forgotten(rig)
    pass_time(rig, GAP_S / 2)
    rig.faulty.faults = HUNG
    ticket = engine.ask(other)
    rig.settle()
    for _ in range(9):
        rig.clock.advance(0.1)  # the breaker has not opened yet
        rig.turns()
    rig.level._reads_breaker._calls.clear()  # nothing is overdue
    for _ in range(100):
        rig.clock.advance(0.1)
        rig.turns()
    assert rig.stat("dict_prefetched_blocks") == 0
    engine.release(ticket)


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_nothing_is_guessed_while_the_tier_is_not_well(how: str) -> None:
    rig = made()
    engine = rig.join()
    other = chain(4, 900)
    fill(engine, other)
    talk(rig, engine)
    forgotten(rig)
    pass_time(rig, GAP_S / 2)
    rig.faulty.faults = TierFaults(fail=1.0) if how == "fails" else HUNG
    for n in range(4):
        engine.ask(at(other, n))
        rig.settle()
    rig.clock.advance(1.5)
    rig.turns()
    pass_time(rig, GAP_S / 2)
    assert rig.stat("dict_reads_stopped") >= 1
    assert rig.stat("dict_prefetched_blocks") == 0
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()


@pytest.mark.parametrize("how", ["cleared", "barred", "gone"])
def test_a_namespace_that_ends_is_not_brought_up_again(how: str) -> None:
    """Not even what is under way: one guess in the middle, and one that is to come."""
    rig = made()
    for n in range(1, 65):
        rig.level.reads.speed.read(n << 20, (n << 20) / 1e7, 1.0)
    engine = rig.join()
    digests = talk(rig, engine)
    forgotten(rig)
    while not rig.stat("dict_prefetched_blocks"):
        pass_time(rig, 0.1)
    before = rig.stat("dict_prefetched_blocks")
    assert before < WHOLE
    assert engine.scheduler.member is not None
    session = engine.scheduler.member.session
    origin = session.origins(0)[0]
    match how:
        case "cleared":
            lies = dict(rig.below.blocks)
            rig.hierarchy.operator.clear(rig.hierarchy.operator.tiers, origin.tag, lambda sums: None)
            rig.below.blocks |= lies  # it is not through with them yet
        case "barred":
            rig.hierarchy.canaries._tags = frozenset({origin.tag})
        case "gone":
            for member in engine.members:
                member.leave()
    pass_time(rig, 2 * GAP_S)
    assert rig.stat("dict_prefetched_blocks") == before
    assert there(rig, engine, digests) <= before


def test_what_was_cleared_before_it_is_due_is_not_brought_up() -> None:
    rig = made()
    engine = rig.join()
    digests = talk(rig, engine)
    assert engine.scheduler.member is not None
    lies = dict(rig.below.blocks)
    tag = engine.scheduler.member.session.origins(0)[0].tag
    rig.hierarchy.operator.clear(rig.hierarchy.operator.tiers, tag, lambda sums: None)
    rig.settle()
    rig.below.blocks |= lies  # it is not through with them yet
    pass_time(rig, GAP_S)
    assert rig.stat("dict_prefetched_blocks") == there(rig, engine, digests) == 0


def test_a_guess_is_of_no_use_when_the_turn_has_come() -> None:
    rig = made()
    engine = rig.join()
    digests = talk(rig, engine)
    pass_time(rig, GAP_S / 2)
    assert engine.found(digests) == WHOLE
    forgotten(rig)
    pass_time(rig, 0.45 * GAP_S)
    assert rig.stat("dict_prefetched_blocks") == 0, "it was to come by now, and has"


def test_a_turn_that_comes_early_takes_over() -> None:
    rig = made()
    for n in range(1, 65):
        rig.level.reads.speed.read(n << 20, (n << 20) / 1e7, 1.0)
    engine = rig.join()
    digests = talk(rig, engine)
    forgotten(rig)
    while not rig.stat("dict_prefetched_blocks"):
        pass_time(rig, 0.1)
    before = rig.stat("dict_prefetched_blocks")
    assert engine.found(digests) == WHOLE
    assert rig.stat("dict_recalled_blocks") == WHOLE, "each was read once"
    pass_time(rig, 5.0)
    assert rig.stat("dict_prefetched_blocks") == before < WHOLE


def test_wrong_guesses_end_guessing_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "FIRST_PAUSE_S", 10 * GAP_S)
    rig = made()
    engine = rig.join()
    brought = []
    for n in range(MIN_GUESSES + 2):
        digests = talk(rig, engine, 1000 * n)
        forgotten(rig)
        pass_time(rig, GAP_S, 0.5)
        brought.append(there(rig, engine, digests) > 0)
        pass_time(rig, GAP_S, GAP_S)
    assert brought == [True] * MIN_GUESSES + [False] * 2
    assert rig.stat("dict_prefetched_blocks") == rig.stat("prefetches_unused")
    rig.clock.advance(10 * GAP_S)
    digests = talk(rig, engine, 50000)
    forgotten(rig)
    pass_time(rig, GAP_S)
    assert there(rig, engine, digests) == WHOLE, "it is tried again"


def test_who_asks_for_nothing_to_be_recalled_has_nothing_brought_up() -> None:
    rig = made()
    engine, digests = rig.join(), chain(4)
    fill(engine, digests)
    for _ in range(4):
        engine.release(engine.ask(digests, recall="never"))
        rig.settle()
        pass_time(rig, GAP_S, GAP_S)
    forgotten(rig)
    pass_time(rig, GAP_S)
    assert rig.stat("dict_prefetched_blocks") == 0


def test_what_cannot_be_read_ends_as_any_read_does() -> None:
    rig = made()
    engine = rig.join()
    digests = talk(rig, engine)
    forgotten(rig)
    rig.damage(rig.name(engine, at(digests, 2)), 5000)
    pass_time(rig, 3 * GAP_S, 0.5)
    rig.settle()
    assert rig.hierarchy.migration.prefetch is not None and rig.hierarchy.migration.prefetch.held_bytes == 0
    assert engine.found(digests) == 2


def test_what_is_due_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation that goes on before it was expected leaves a guess behind, each time."""
    monkeypatch.setattr(p, "MAX_CONVERSATIONS", 4)
    rig = made()
    engine = rig.join()
    talk(rig, engine)
    guesses, member = rig.hierarchy.migration.prefetch, engine.scheduler.member
    assert guesses is not None and member is not None
    (conversation,) = {guess.conversation for _, _, guess in guesses._due}
    for _ in range(40):
        conversation.turn += 1
        guesses._expect(conversation, member.session)
        assert len(guesses._due) <= 8
    assert guesses._due[-1][2].turn == conversation.turn


def test_a_long_prompt_is_noted_in_slices_and_one_too_long_not_at_all() -> None:
    rig = made()
    engine = rig.join()
    assert rig.hierarchy.migration.prefetch is not None
    known = rig.hierarchy.migration.prefetch._conversations
    looked: list[bytes] = []
    known.ends = looked.append  # type: ignore[assignment, method-assign, return-value]
    engine.scheduler.say(m.Ask(1, 0, 1, chain(p.MAX_CHAIN + 1), 0, ""))
    rig.settle()
    assert len(known) == 0 and not looked
    del known.ends
    engine.scheduler.say(m.Ask(2, 0, 2, chain(1000), 0, ""))
    rig.hierarchy.turn()
    assert len(known) == 0
    rig.settle()
    assert (len(known), known.ids) == (1, 1000)


def test_requests_that_wait_to_be_noted_are_bounded() -> None:
    rig = DeepRig(prefetch=True)
    engine = rig.join()
    assert engine.scheduler.member is not None and rig.hierarchy.migration.prefetch is not None
    session = engine.scheduler.member.session
    for n in range(p.MAX_NOTED + 10):
        rig.hierarchy.migration.prefetch.asked(session, session.origins(0)[0], chain(2, 10 * n))
    assert rig.hierarchy.migration.prefetch._noting == p.MAX_NOTED
    rig.settle()
    assert rig.hierarchy.migration.prefetch._noting == 0
