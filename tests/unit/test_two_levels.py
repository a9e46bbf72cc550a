"""Two levels below the arena: a tier of this well's own, and a remote one that others write to as well."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from deep import HEALTHY, HUNG, DeepRig, at, chain, fill, told

from lab.rig.members import FakeEngine
from stepwell.hierarchy.levels.breaker import FAILURES, OVERDUE_S
from stepwell.hierarchy.levels.reads import MAX_PROBES
from stepwell.hierarchy.saved import PauseRecord
from stepwell.policies.writing.base import WritePolicy
from stepwell.policies.writing.named import WRITE_POLICIES
from stepwell.protocol import messages as m
from stepwell.protocol.messages import MAX_ALLOWED_S
from stepwell.testing.remote_tier import Store
from stepwell.tiers.base import Incoming, ReadDone, Reading
from stepwell.tiers.faulty import TierFaults
from stepwell.vault.keyring import Keyring

FAILS = TierFaults(fail=1.0)
BLOCKS = 6


def rig_of(store: Store, slabs: int = 2, keyring: Keyring | None = None, write: WritePolicy | None = None) -> DeepRig:
    return DeepRig(slabs, store=store, keyring=keyring, write=write)


def filled(store: Store, slabs: int = 2, blocks: int = BLOCKS) -> DeepRig:
    """A well that has found nothing of its own, and a store with a chain of blocks that another one has written."""
    other = rig_of(store, -(-blocks // 8) + 1)
    fill(other.join(), chain(blocks))
    other.settle()
    assert len(store) == blocks
    return rig_of(store, slabs, other.keyring)


def both(slabs: int = 2, blocks: int = BLOCKS) -> tuple[DeepRig, FakeEngine]:
    """A well with nothing in host memory and a chain of blocks in either tier."""
    rig = filled({}, slabs, blocks)
    engine = rig.join()
    assert words(engine, chain(blocks)) == list(range(100, 100 + blocks))
    empty(rig)
    assert len(rig.below.blocks) == blocks and rig.stat("blocks") == 0
    return rig, engine


def empty(rig: DeepRig, tiers: tuple[str, ...] = ("host",), namespace: bytes = b"") -> dict[str, int]:
    """Clears these tiers; how many blocks went, by tier."""
    done: list[dict[str, int]] = []
    rig.hierarchy.operator.drop(
        frozenset(tiers), namespace, lambda sums: done.append({tier: sum.blocks for tier, sum in sums.items()})
    )
    rig.settle()
    (gone,) = done
    return gone


def words(engine: FakeEngine, digests: bytes) -> list[int]:
    """What the blocks say that can be recalled now."""
    ticket = engine.ask(digests)
    engine.rig.settle()
    answer = engine.answer(ticket)
    assert answer.more is False
    found = told(engine, answer.refs)
    engine.release(ticket)
    engine.rig.settle()
    return found


def sources(engine: FakeEngine, digests: bytes) -> list[int]:
    """Where each block came from that can be recalled now: 0 is host memory, n the tier on level n - 1."""
    ticket = engine.ask(digests)
    engine.rig.settle()
    engine.answer(ticket)
    found = b"".join(found.sources for found in engine._found[ticket])
    engine.release(ticket)
    engine.rig.settle()
    return list(found)


# where a block is read from ------------------------------------------------------------------------------------------


def test_what_another_well_has_written_is_found() -> None:
    rig = filled({})
    engine = rig.join()
    assert sources(engine, chain(BLOCKS)) == [2] * BLOCKS
    assert sources(engine, chain(BLOCKS)) == [0] * BLOCKS, "it is in host memory now"
    assert rig.remote.probes == 1, "the second request has found all that it asked for"


def test_the_uppermost_level_is_read() -> None:
    rig, engine = both()
    assert sources(engine, chain(BLOCKS)) == [1] * BLOCKS
    assert rig.stat("dict_recalled_blocks") == BLOCKS


def test_a_run_may_lie_on_several_levels() -> None:
    rig, engine = both()
    for n in (1, 2, 5):
        rig.below.drop(rig.name(engine, at(chain(BLOCKS), n)))
    assert sources(engine, chain(BLOCKS)) == [1, 2, 2, 1, 1, 2]


def test_a_block_that_only_a_shared_tier_has_is_asked_for_once_by_a_request() -> None:
    rig = filled({})
    engine = rig.join()
    ticket = engine.ask(chain(BLOCKS + 3))
    rig.settle()
    answer = engine.answer(ticket)
    assert (len(answer.refs), answer.reason, rig.remote.probes) == (BLOCKS, "never_seen", 1)


def test_a_request_waits_for_a_probe_as_for_a_tier() -> None:
    rig = filled({})
    engine = rig.join()
    rig.far.faults = HUNG
    ticket = engine.ask(chain(BLOCKS))
    rig.turns()
    assert (engine.answer(ticket).more, engine.answer(ticket).reason) == (True, "staging")
    rig.far.faults = HEALTHY
    rig.far.release()
    rig.settle()
    assert told(engine, engine.answer(ticket).refs) == list(range(100, 100 + BLOCKS))


@pytest.mark.parametrize("faults", [HUNG, FAILS], ids=["hangs", "fails"])
def test_a_probe_that_is_not_answered_is_a_miss(faults: TierFaults) -> None:
    rig = filled({})
    engine = rig.join()
    rig.far.faults = faults
    ticket = engine.ask(chain(BLOCKS))
    rig.turns()
    rig.clock.advance(OVERDUE_S)
    rig.settle()
    answer = engine.answer(ticket)
    assert (len(answer.refs), answer.more, answer.reason) == (0, False, "never_seen")
    engine.release(ticket)
    rig.far.faults = HEALTHY
    rig.far.release()
    rig.settle()
    assert not rig.hierarchy._recalls._probes._asked


def test_probes_of_a_tier_are_bounded() -> None:
    rig = filled({})
    engine = rig.join()
    rig.far.faults = HUNG
    tickets = [engine.ask(chain(2, 100 * n)) for n in range(MAX_PROBES + 3)]
    rig.turns()
    assert rig.far.hanging == MAX_PROBES
    assert [engine.answer(ticket).more for ticket in tickets[-3:]] == [False] * 3, "who comes then has a miss"
    for ticket in tickets:
        engine.release(ticket)
    rig.far.faults = HEALTHY
    rig.far.release()
    rig.settle()


def test_what_vanishes_is_a_miss_and_known_no_more() -> None:
    store: Store = {}
    rig = filled(store)
    engine = rig.join()
    rig.far.faults = HUNG
    ticket = engine.ask(chain(BLOCKS))
    rig.turns()
    rig.far.faults = HEALTHY
    rig.far.release()  # the probe
    lost = rig.name(engine, at(chain(BLOCKS), 3))
    rig.executor.drain()
    assert rig.remote.lookup(lost)
    del store[lost]
    rig.settle()
    answer = engine.answer(ticket)
    assert (told(engine, answer.refs), answer.reason) == ([100, 101, 102], "not_readable")
    assert not rig.remote.lookup(lost)


# one level fails, another has it --------------------------------------------------------------------------------------


def test_a_read_that_fails_is_tried_on_the_next_level() -> None:
    rig, engine = both()
    rig.faulty.faults = FAILS
    assert sources(engine, chain(BLOCKS)) == [2] * BLOCKS
    assert rig.stat("dict_not_recalled_failed") > 0
    assert rig.stat("misses_not_readable") == 0


def test_a_block_that_is_damaged_on_one_level_comes_from_the_next_and_is_written_again() -> None:
    rig, engine = both()
    id = rig.name(engine, at(chain(BLOCKS), 2))
    rig.damage(id, 5000)
    assert words(engine, chain(BLOCKS)) == list(range(100, 100 + BLOCKS))
    rig.far.faults = FAILS
    empty(rig)
    assert sources(engine, chain(BLOCKS)) == [1] * BLOCKS, "the damaged block was replaced"


def test_a_tier_that_hangs_is_gone_around() -> None:
    rig, engine = both(4)
    rig.faulty.faults = HUNG
    ticket = engine.ask(chain(BLOCKS))
    rig.turns()
    assert (engine.answer(ticket).more, engine.answer(ticket).reason) == (True, "staging")
    rig.clock.advance(OVERDUE_S)
    rig.settle()
    answer = engine.answer(ticket)
    assert answer.more is False
    assert told(engine, answer.refs) == list(range(100, 100 + BLOCKS))
    assert sources(engine, chain(BLOCKS)) == [0] * BLOCKS
    rig.faulty.faults = HEALTHY
    rig.faulty.release()  # what it brings now was superseded
    rig.settle()
    assert rig.stat("dict_not_recalled_superseded") > 0
    engine.release(ticket)
    rig.settle()


def test_what_waits_behind_reads_that_hang_is_read_from_the_next_level() -> None:
    rig, engine = both(6, 24)
    rig.level.reads._ended = 0
    rig.faulty.faults = HUNG
    ticket = engine.ask(chain(24))
    rig.turns()
    begun = sum(map(len, rig.level.reads.reading.values()))
    assert 0 < begun < 24
    rig.clock.advance(OVERDUE_S)
    rig.settle()
    assert told(engine, engine.answer(ticket).refs) == list(range(100, 124))
    assert len(rig.level.reads.promoting) == begun, "those that hang keep their slots"
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()


def test_a_level_that_is_down_is_not_read_while_another_has_the_block() -> None:
    rig, engine = both()
    rig.faulty.faults = HUNG
    ticket = engine.ask(chain(1))
    rig.turns()
    rig.clock.advance(OVERDUE_S)
    rig.settle()
    calls = len(rig.asked)
    assert sources(engine, chain(BLOCKS))[1:] == [2] * (BLOCKS - 1)
    assert len(rig.asked) == calls
    engine.release(ticket)
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()


@pytest.mark.parametrize("before", [True, False], ids=["before", "meanwhile"])
def test_a_shared_tier_is_probed_before_a_run_ends_at_a_tier_that_is_down(before: bool) -> None:
    """It was not asked yet what it has: nothing of this run was missing above it."""
    rig, engine = both(4)
    rig.remote.known.clear()
    rig.faulty.faults = HUNG
    first = engine.ask(chain(BLOCKS))
    rig.turns()
    if before:
        engine.release(first)
    rig.clock.advance(OVERDUE_S)
    rig.settle()
    ticket = engine.ask(chain(BLOCKS)) if before else first
    rig.settle()
    assert told(engine, engine.answer(ticket).refs) == list(range(100, 100 + BLOCKS))
    engine.release(ticket)
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()


def test_probes_that_are_answered_say_nothing_of_reads_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = filled({})
    engine = rig.join()

    def fail(blocks: Sequence[Incoming], done: ReadDone) -> None:
        rig.executor.submit(lambda: None, lambda _: done([Reading.FAILED] * len(blocks)))

    monkeypatch.setattr(rig.remote, "read", fail)
    for _ in range(2 * FAILURES):
        rig.remote.known.clear()
        assert words(engine, chain(1)) == []
    assert rig.stat("remote_reads_stopped") > 0


def test_who_waits_is_told_what_the_next_level_allows() -> None:
    rig, engine = both()
    rig.level.reads.healthy._before = 0.001
    rig.faulty.faults, rig.far.faults = FAILS, HUNG
    ticket = engine.ask(chain(BLOCKS))
    rig.settle()
    engine.answer(ticket)
    assert [found.allow_s for found in engine._found[ticket]] == [0.001, MAX_ALLOWED_S]
    engine.release(ticket)
    rig.faulty.faults = rig.far.faults = HEALTHY
    rig.far.release()
    rig.settle()


def test_a_read_that_runs_is_waited_for_by_the_earliest_that_wants_it() -> None:
    rig, engine = both()
    rig.faulty.faults = HUNG
    tickets = [engine.ask(chain(BLOCKS), order=order) for order in (50, -1)]
    rig.turns()
    assert rig.level.reads.ahead((0.0, 0)) > 0
    for ticket in tickets:
        engine.release(ticket)
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()


def test_without_another_level_a_run_ends_at_a_tier_that_is_down() -> None:
    rig, engine = both()
    rig.far.faults = rig.faulty.faults = HUNG
    ticket = engine.ask(chain(BLOCKS))
    rig.turns()
    rig.clock.advance(OVERDUE_S)
    rig.settle()
    assert (engine.answer(ticket).more, engine.answer(ticket).reason) == (True, "staging")
    rig.clock.advance(OVERDUE_S)  # it was read from the remote tier instead, and that hangs too
    rig.settle()
    answer = engine.answer(ticket)
    assert (len(answer.refs), answer.more, answer.reason) == (0, False, "tier_down")
    engine.release(ticket)
    rig.far.faults = rig.faulty.faults = HEALTHY
    rig.far.release()
    rig.faulty.release()
    rig.settle()


def test_a_read_that_fails_for_nobody_is_not_tried_again() -> None:
    rig, engine = both()
    rig.faulty.faults = TierFaults(fail=1.0, hang=1.0)
    ticket = engine.ask(chain(BLOCKS))
    rig.turns()
    engine.release(ticket)
    reads = rig.remote.reads
    rig.faulty.release()
    rig.settle()
    assert rig.stat("dict_not_recalled_failed") > 0
    assert rig.remote.reads == reads


# writing --------------------------------------------------------------------------------------------------------------


def test_what_is_spilled_is_written_to_each_level() -> None:
    store: Store = {}
    rig = rig_of(store)
    fill(rig.join(), chain(BLOCKS))
    rig.settle()
    assert len(rig.below.blocks) == len(store) == BLOCKS
    assert rig.stat("dict_spilled_blocks") == rig.stat("remote_spilled_blocks") == BLOCKS


def test_what_comes_from_a_lower_level_is_written_to_the_upper_one() -> None:
    rig = filled({})
    engine = rig.join()
    assert words(engine, chain(BLOCKS)) == list(range(100, 100 + BLOCKS))
    assert len(rig.below.blocks) == BLOCKS
    assert rig.stat("remote_spilled_blocks") == 0, "and not to where it came from"


def test_what_comes_from_an_upper_level_is_not_written_to_the_lower_one() -> None:
    rig, engine = both()
    store = rig.remote.blocks
    store.clear()
    rig.remote.known.clear()
    assert len(words(engine, chain(BLOCKS))) == BLOCKS
    assert not store


@pytest.mark.parametrize("policy", sorted(WRITE_POLICIES))
def test_each_level_has_what_its_write_policy_says(policy: str) -> None:
    store: Store = {}
    other = rig_of(store)
    fill(other.join(), chain(BLOCKS))
    other.settle()
    rig = rig_of(store, 2, other.keyring, WRITE_POLICIES[policy]())
    engine = rig.join()
    words(engine, chain(BLOCKS))
    once = len(rig.below.blocks)
    words(engine, chain(BLOCKS))
    assert once == (BLOCKS if policy == "through" else 0)
    assert len(rig.below.blocks) == (0 if policy == "back" else BLOCKS)


def test_what_is_promoted_is_not_written_while_spills_are_paused() -> None:
    rig = filled({})
    engine = rig.join()
    rig.hierarchy.operator.pause(PauseRecord("spills", 1.0, 0, "a test"))
    assert len(words(engine, chain(BLOCKS))) == BLOCKS
    assert not rig.below.blocks


def test_one_level_that_cannot_be_written_keeps_nothing_from_the_other() -> None:
    store: Store = {}
    rig = rig_of(store)
    rig.far.faults = FAILS
    fill(rig.join(), chain(BLOCKS))
    rig.settle()
    assert (len(rig.below.blocks), len(store)) == (BLOCKS, 0)
    assert rig.stat("remote_skipped_failed") > 0


def test_a_well_ends_when_each_level_has_what_waits() -> None:
    store: Store = {}
    rig = rig_of(store, write=WRITE_POLICIES["back"]())
    fill(rig.join(), chain(BLOCKS))
    rig.settle()
    assert not store
    done: list[bool] = []
    rig.hierarchy.drain(lambda: done.append(True))
    rig.settle()
    assert done == [True] and len(store) == len(rig.below.blocks) == BLOCKS


def test_what_is_promoted_when_the_well_ends_is_not_written() -> None:
    """A tier may be settled by then."""
    rig = filled({})
    engine = rig.join()
    rig.hierarchy.drain(lambda: None)
    rig.settle()
    assert len(words(engine, chain(BLOCKS))) == BLOCKS
    assert not rig.below.blocks


# clearing and forgetting ----------------------------------------------------------------------------------------------


def test_a_tier_is_cleared_by_its_name() -> None:
    rig, engine = both()
    assert empty(rig, ("dict",)) == {"dict": BLOCKS}
    assert not rig.below.blocks and len(rig.remote.blocks) == BLOCKS
    assert sources(engine, chain(BLOCKS)) == [2] * BLOCKS


def test_after_all_was_cleared_nothing_comes_back() -> None:
    for seed in range(0, 40, 3):
        random.seed(seed)
        rig, engine = both() if seed % 4 else (rig := filled({}), rig.join())
        ticket = engine.ask(chain(BLOCKS))
        rig.turns()
        for _ in range(seed):
            rig.executor.step()
            rig.hierarchy.turn()
        empty(rig, ("host", "dict", "remote"))
        engine.release(ticket)
        rig.settle()
        assert not rig.below.blocks and not rig.remote.blocks
        assert words(engine, chain(BLOCKS)) == []


def test_a_tier_that_is_never_clear_keeps_no_other_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, _ = both()
    monkeypatch.setattr(rig.remote, "clear", lambda done, namespace=b"": None)
    rig.hierarchy.operator.drop(frozenset(("host", "dict", "remote")), b"", lambda sums: None)
    rig.settle()
    assert not rig.below.blocks


def test_what_an_engine_found_wrong_is_forgotten_on_each_level() -> None:
    rig, engine = both()
    engine.scheduler.say(m.Forget(0, at(chain(BLOCKS), 0)))
    rig.settle()
    assert len(rig.below.blocks) == len(rig.remote.blocks) == BLOCKS - 1
    assert words(engine, chain(BLOCKS)) == []


# deciding -------------------------------------------------------------------------------------------------------------


def test_what_a_probe_has_found_is_weighed_with_the_rest() -> None:
    rig = filled({})
    engine = rig.join()
    assert words(engine, chain(2)) == [100, 101], "the upper tier has the beginning from now on"
    empty(rig)
    rig.remote.known.clear()
    ticket = engine.ask(chain(BLOCKS), tokens=BLOCKS * 16)
    rig.settle()
    assert len(engine.answer(ticket).refs) == BLOCKS
    (later, _), (earlier, ended) = rig.hierarchy.decisions.latest(2)
    assert dict(earlier.blocks) == {"dict": 2} and ended is not None
    assert sum(later.blocks.values()) == BLOCKS and later.blocks["remote"] == BLOCKS - 2
