"""What goes wrong below, and whose blocks they are: nothing wrong is told, and nothing waits for ever."""

from __future__ import annotations

import pytest
from deep import HEALTHY, HUNG, PAYLOAD, PLAIN, TWO, DeepRig, at, chain, fill, told, written

from lab.rig.members import FakeEngine, Model
from stepwell.block.layout import PAGE
from stepwell.block.namespace import DEFAULT_TENANT
from stepwell.errors import CapacityError
from stepwell.hierarchy import audit
from stepwell.hierarchy.levels import speed
from stepwell.hierarchy.levels.breaker import FIRST_PAUSE_S, OVERDUE_S
from stepwell.hierarchy.levels.speed import KNOWN, HealthyReads
from stepwell.protocol.messages import MAX_ALLOWED_S
from stepwell.testing.arena_kit import SLOT, SLOTS
from stepwell.testing.dict_tier import Kept
from stepwell.testing.executor import JobFaults
from stepwell.testing.sparse import SparseShared
from stepwell.tiers.faulty import TierFaults
from stepwell.vault.keyring import Epoch, Keyring, TenantKeys

# reads that go wrong -------------------------------------------------------------------------------------------------

HEADER, TAG = 100, PAGE + SLOT + 3


def cut(kept: Kept) -> Kept:
    return Kept(kept.frames[: len(kept.frames) // 2], kept.segment)


def longer(kept: Kept) -> Kept:
    return Kept(kept.frames + bytes(PAGE), kept.segment)


def elsewhere(kept: Kept) -> Kept:
    return Kept(kept.frames, bytes(16))


@pytest.mark.parametrize("model", [PLAIN, TWO], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("what", ["header", "payload", "tag", "last shard", "swapped", "cut", "longer", "elsewhere"])
def test_a_run_ends_before_what_is_not_as_it_was_written(what: str, model: Model) -> None:
    rig = DeepRig(4)
    fill(rig.join(model), chain(8))
    rig.settle()
    rig = rig.next_life(4)
    engine, digests, bad = rig.join(model), chain(8), 3
    ids = [rig.name(engine, at(digests, n)) for n in range(8)]
    blocks = rig.below.blocks
    match what:
        case "swapped":
            blocks[ids[3]], blocks[ids[4]] = blocks[ids[4]], blocks[ids[3]]
        case "cut" | "longer" | "elsewhere":
            blocks[ids[3]] = {"cut": cut, "longer": longer, "elsewhere": elsewhere}[what](blocks[ids[3]])
        case "last shard":
            rig.damage(ids[3], len(blocks[ids[3]].frames) - PAGE)
        case _:
            rig.damage(ids[3], {"header": HEADER, "payload": PAYLOAD, "tag": TAG}[what])
    ticket = engine.ask(digests)
    rig.turns()
    while rig.executor.step():
        audit.hierarchy(rig.hierarchy)
        rig.turns()
        audit.hierarchy(rig.hierarchy)
    answer = engine.answer(ticket)
    assert (len(answer.refs), answer.more, answer.reason) == (bad, False, "not_readable")
    assert told(engine, answer.refs) == [100, 101, 102]
    assert rig.stat("pinned_bytes") == bad * SLOT * model.world, "those behind it are let go"
    assert rig.stat("misses_not_readable") == 5
    assert not rig.plaintext(103), "what did not prove itself is wiped"
    reason = "absent" if what == "elsewhere" else "damaged"
    assert rig.stat(f"dict_not_recalled_{reason}") in ((1, 2) if what == "swapped" else (1,))
    assert ids[3] not in blocks
    engine.release(ticket)
    reads = rig.below.reads
    assert engine.found(digests) == bad
    assert rig.below.reads == reads, "it is not tried again"
    assert engine.spill(at(digests, 3), word=103) == 1, "but may be written anew"
    rig.settle()
    assert ids[3] in blocks


def test_a_device_that_says_no_ends_the_run_and_is_asked_again_by_the_next() -> None:
    rig = written(2, 6)
    engine = rig.join()
    rig.faulty.faults = TierFaults(fail=1.0)
    for asks in (1, 2):
        ticket = engine.ask(chain(1))
        rig.settle()
        assert (len(engine.answer(ticket).refs), engine.answer(ticket).reason) == (0, "not_readable")
        assert rig.stat("dict_not_recalled_failed") == rig.below.reads == asks
        engine.release(ticket)
    rig.settle()
    assert rig.stat("free_slots") == rig.stat("slabs") * SLOTS
    rig.faulty.faults = HEALTHY
    assert engine.found(chain(6)) == 6


@pytest.mark.parametrize("faults", [TierFaults(flip=1.0), TierFaults(swap=1.0)], ids=["flip", "swap"])
def test_what_comes_back_wrong_is_never_told(faults: TierFaults) -> None:
    rig = written(2, 6)
    engine = rig.join()
    rig.faulty.faults = faults
    ticket = engine.ask(chain(6))
    rig.settle()
    answer = engine.answer(ticket)
    assert answer.more is False
    assert told(engine, answer.refs) == [100 + n for n in range(len(answer.refs))]
    assert faults.swap or len(answer.refs) < 6, "a bit of padding says nothing, but not six times"


def test_an_opener_that_raises_is_a_failed_read(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = written(2, 2)
    engine = rig.join()
    monkeypatch.setattr(rig.executor, "faults", JobFaults(fail=1.0))
    ticket = engine.ask(chain(2))
    rig.settle()
    assert (len(engine.answer(ticket).refs), engine.answer(ticket).reason) == (0, "not_readable")
    assert rig.stat("filling") == 0


def test_a_slab_that_cannot_be_made_is_not_waited_for() -> None:
    rig = written(2, 2)
    engine = FakeEngine(rig)
    ticket = engine.ask(chain(2))
    rig.turns()
    assert (engine.answer(ticket).more, engine.answer(ticket).reason) == (True, "mapping")
    rig.executor.faults = JobFaults(fail=1.0)
    rig.memory.refuse = True
    rig.settle()
    assert (engine.answer(ticket).more, engine.answer(ticket).reason) == (False, "no_room")


def test_memory_that_is_refused_is_not_asked_for_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = written(2, 2)
    engine = FakeEngine(rig)

    def refuse(shared: object, start: int, length: int) -> None:
        raise CapacityError("SW-202", what="no memory", why="the test said so", fix="none")

    monkeypatch.setattr(SparseShared, "populate", refuse)
    ticket = engine.ask(chain(2))
    rig.settle()
    assert (engine.answer(ticket).more, engine.answer(ticket).reason) == (False, "no_room")
    assert len(rig.memory.made) < 5


def test_a_well_sleeps_while_what_is_to_be_written_waits_for_a_tier_that_is_down() -> None:
    rig = written(8, 4)
    engine = rig.join()
    rig.faulty.faults = HUNG
    ticket = engine.ask(chain(4))
    rig.turns()
    rig.clock.advance(OVERDUE_S)
    fill(engine, chain(2, 500))
    rig.settle()
    assert rig.stat("dict_write_queue_bytes") > 0 and rig.stat("dict_reads_up") == 0
    due = rig.hierarchy.next_moment
    assert due is None or due > rig.clock.now()
    engine.release(ticket)
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()
    rig.clock.advance(FIRST_PAUSE_S)
    rig.settle()
    assert rig.stat("dict_write_queue_bytes") == 0


# a tier that hangs ---------------------------------------------------------------------------------------------------


def test_a_tier_that_hangs_is_asked_for_nothing_more_until_it_answers() -> None:
    rig = written(8, 14)
    engine, digests = rig.join(), chain(14)
    rig.faulty.faults = HUNG
    first = engine.ask(digests[:128])
    rig.turns()
    rig.clock.advance(OVERDUE_S - 0.001)
    second = engine.ask(digests[:192])
    rig.turns()
    assert engine.answer(second).reason == "staging", "not yet"
    assert rig.stat("dict_reads_up") == 1
    rig.clock.advance(0.001)
    assert rig.stat("dict_reads_up") == 0
    calls = len(rig.level.reads.reading)
    third = engine.ask(at(digests, 13))
    rig.settle()
    assert (engine.answer(third).more, engine.answer(third).reason) == (False, "tier_down")
    assert [engine.answer(ticket).reason for ticket in (first, second)] == ["tier_down"] * 2, "and so are they"
    assert rig.stat("misses_tier_down") == 4 + 6 + 1
    fill(engine, chain(2, 500))
    rig.settle()
    assert not rig.level.writes.writing
    assert len(rig.level.reads.reading) == calls
    for ticket in (first, second):
        engine.release(ticket)
    rig.settle()
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.settle()
    rig.clock.advance(FIRST_PAUSE_S)
    rig.settle()
    assert rig.stat("dict_reads_up") == 1
    assert engine.found(digests) == 14
    assert len(rig.below.blocks) == 16, "what waited was written"


def test_requests_that_wait_for_a_tier_are_answered_when_its_breaker_opens() -> None:
    """Some wait for blocks, some for room to pin theirs. What has landed is theirs, and the rest ends with a reason."""
    rig = written(8, 14)
    engine, digests = rig.join(), chain(14)
    assert engine.found(digests[:64]) == 2
    rig.faulty.faults = HUNG
    tickets = [engine.ask(digests), engine.ask(digests), engine.ask(at(digests, 9))]
    rig.settle()
    assert all(engine.answer(ticket).more for ticket in tickets)
    due = rig.hierarchy.next_moment
    assert due is not None
    rig.clock.advance(due - rig.clock.now())
    rig.settle()
    answers = [engine.answer(ticket) for ticket in tickets]
    assert [(answer.more, answer.reason) for answer in answers] == [(False, "tier_down")] * 3
    assert [len(answer.refs) for answer in answers] == [2, 2, 0]
    audit.hierarchy(rig.hierarchy)


def test_a_write_that_hangs_stops_writes_and_no_reads() -> None:
    """It may wait for other things than the device: for a recovery, or for room."""
    rig = written(2, 2)
    engine = rig.join()
    rig.faulty.faults = HUNG
    fill(engine, chain(1, 500))
    rig.clock.advance(OVERDUE_S + 0.001)
    rig.faulty.faults = HEALTHY
    calls = len(rig.level.writes.writing)
    assert engine.found(chain(2)) == 2
    fill(engine, chain(1, 600))
    rig.settle()
    assert len(rig.level.writes.writing) == calls
    assert engine.found(chain(1, 500)) == 1, "the arena needs no tier"


def test_a_block_whose_read_hangs_is_neither_waited_for_again_nor_kept_from_being_filled() -> None:
    rig = written(8, 6)
    engine, digests = rig.join(), chain(6)
    rig.faulty.faults = HUNG
    first = engine.ask(digests)
    rig.turns()
    rig.clock.advance(OVERDUE_S + 0.001)
    second = engine.ask(digests)
    rig.settle()
    assert (engine.answer(second).more, engine.answer(second).reason) == (False, "tier_down")
    assert engine.spill(digests) == 6, "computed, and kept"
    assert engine.found(digests) == 6
    rig.faulty.faults = HEALTHY
    rig.faulty.release()
    rig.clock.advance(FIRST_PAUSE_S)
    rig.settle()
    assert engine.found(digests) == 6
    assert rig.stat("dict_not_recalled_superseded") == 4, "those whose reads had begun; the others were given up"
    engine.release(first)
    rig.settle()
    assert not rig.level.reads.promoting
    audit.hierarchy(rig.hierarchy)


def test_what_nobody_filled_meanwhile_is_there_when_the_tier_comes_back() -> None:
    rig = written(8, 6)
    engine, digests = rig.join(), chain(6)
    rig.faulty.faults = HUNG
    for _ in range(2):
        engine.release(engine.ask(digests))
        rig.turns()
        rig.clock.advance(OVERDUE_S + 0.001)
    rig.faulty.faults = HEALTHY
    reads = rig.below.reads
    rig.faulty.release()
    rig.settle()
    assert engine.found(digests) == 6
    assert rig.below.reads - reads <= 6


def test_what_is_allowed_for_a_block_follows_healthy_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "KNOWN", 2)
    rig = written(2, 6)
    engine = rig.join()
    allowed = []
    for n, seconds in enumerate((0.02, 0.03, 5.0, 0.01)):
        rig.faulty.faults = HUNG
        ticket = engine.ask(at(chain(6), n))
        rig.turns()
        engine.answer(ticket)
        allowed.append(engine._found[ticket][0].allow_s)
        rig.clock.advance(seconds)
        rig.faulty.release()
        rig.settle()
        engine.release(ticket)
    assert allowed == pytest.approx([MAX_ALLOWED_S, MAX_ALLOWED_S, 0.03, 0.03]), "what hung was not healthy"


def test_a_disk_that_fails_quickly_teaches_no_impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "KNOWN", 2)
    rig = written(2, 6)
    engine = rig.join()
    rig.faulty.faults = TierFaults(fail=1.0)
    for n in range(4):
        assert engine.found(at(chain(6), n)) == 0
    assert rig.level.allowance_s(0.0) == MAX_ALLOWED_S


def test_slow_reads_are_remembered_for_a_while_and_only_so_much_is_allowed() -> None:
    reads = HealthyReads()
    for _ in range(KNOWN - 1):
        reads.took(0.001)
    assert reads.slowest_s == MAX_ALLOWED_S, "not enough are known"
    reads.took(0.1)
    assert reads.slowest_s == 0.1
    for _ in range(KNOWN):
        reads.took(0.001)
        assert reads.slowest_s in (0.1, 0.001)
    assert reads.slowest_s == 0.001
    reads.took(0.9)
    assert reads.slowest_s == MAX_ALLOWED_S


# whose blocks --------------------------------------------------------------------------------------------------------


def test_what_another_session_is_filling_is_not_waited_for() -> None:
    rig = written(2, 2)
    one, two = rig.join(), rig.join(name="two")
    leases, _ = one.reserve(chain(2))
    assert all(leases), "it computes what lies below, since it did not wait"
    ticket = two.ask(chain(2))
    rig.settle()
    assert (two.answer(ticket).more, two.answer(ticket).reason) == (False, "filling")
    assert rig.below.reads == 0


def test_what_is_being_staged_is_refused_to_be_spilled() -> None:
    rig = written(2, 2)
    engine = rig.join()
    rig.faulty.faults = HUNG
    engine.ask(chain(2))
    rig.turns()
    leases, _ = engine.reserve(chain(2))
    assert leases == [0, 0]
    assert rig.stat("spills_refused_filling") == 2
    rig.faulty.release()
    rig.settle()


STRANGERS = {
    "weights": Model(weights=b"x" * 32),
    "model": Model(model=b"x" * 32),
    "layout": Model(layout=b"x" * 32),
    "block tokens": Model(block_tokens=256),
    "ranks": Model(world=2),
    "shard bytes": Model(shard_bytes=SLOT - 8),
}


@pytest.mark.parametrize("field", STRANGERS)
def test_another_identity_finds_nothing_below(field: str) -> None:
    rig = written(4, 3)
    assert rig.join(STRANGERS[field]).found(chain(3)) == 0
    assert rig.below.reads == 0
    assert rig.join(name="twin").found(chain(3)) == 3


@pytest.mark.parametrize("field", STRANGERS)
def test_a_frame_of_another_identity_does_not_open(field: str) -> None:
    """Even if a name led to it: whoever can write to the directory can rename what is there."""
    rig = written(4, 1)
    engine, stranger = rig.join(), rig.join(STRANGERS[field], "stranger")
    blocks = rig.below.blocks
    theirs = rig.name(stranger, chain(1))
    blocks[theirs] = blocks[rig.name(engine, chain(1))]
    ticket = stranger.ask(chain(1))
    rig.settle()
    assert (len(stranger.answer(ticket).refs), stranger.answer(ticket).reason) == (0, "not_readable")
    assert not rig.plaintext(100)
    assert theirs not in blocks


def test_weights_epochs_do_not_meet_below() -> None:
    rig = DeepRig()
    fill(rig.join(), chain(2), epoch=5)
    rig.settle()
    rig = rig.next_life()
    engine = rig.join()
    assert [engine.found(chain(2), epoch=n) for n in (0, 6, 2**64 - 1)] == [0, 0, 0]
    assert rig.below.reads == 0
    assert engine.found(chain(2), epoch=5) == 2


def _keys(*keys: bytes, tenant: str = DEFAULT_TENANT) -> Keyring:
    epochs = tuple(Epoch(len(keys) - n, key) for n, key in enumerate(keys))
    return Keyring((TenantKeys(tenant, epochs),))


def test_keys_decide_what_is_found() -> None:
    rig = DeepRig(keyring=_keys(b"a" * 32))
    fill(rig.join(), chain(3), word=30)
    rig.settle()
    other = rig.next_life(keyring=_keys(b"b" * 32))
    assert other.join().found(chain(3)) == 0
    assert other.below.reads == 0
    assert len(other.below.blocks) == 3, "kept: the keys may come back"
    rotated = rig.next_life(keyring=_keys(b"b" * 32, b"a" * 32))
    engine = rotated.join()
    ticket = engine.ask(chain(3))
    rotated.settle()
    assert told(engine, engine.answer(ticket).refs) == [30, 31, 32]
    fill(engine, chain(5)[96:], parent=at(chain(5), 2), word=33)
    rotated.settle()
    newest = rotated.next_life(keyring=_keys(b"b" * 32)).join()
    assert newest.found(chain(5)) == 0
    assert newest.found(chain(5)[96:]) == 2, "of the newest epoch"
    both = rotated.next_life(keyring=_keys(b"c" * 32, b"b" * 32, b"a" * 32)).join()
    assert both.found(chain(5)) == 5


def test_a_sealed_well_believes_no_plain_frame() -> None:
    plain = DeepRig(sealed=False)
    fill(plain.join(), chain(2))
    plain.settle()
    assert plain.next_life(sealed=False).join().found(chain(2)) == 2
    sealed = plain.next_life(sealed=True)
    ticket = (engine := sealed.join()).ask(chain(2))
    sealed.settle()
    assert (len(engine.answer(ticket).refs), engine.answer(ticket).reason) == (0, "not_readable")
    assert not sealed.plaintext(100)


def test_a_plain_well_reads_what_was_sealed_for_it_and_notices_damage_to_what_it_wrote() -> None:
    rig = written(2, 2, sealed=False)
    engine = rig.join()
    assert engine.found(chain(2)) == 2
    fill(engine, chain(2, 50), word=60)
    rig.settle()
    again = rig.next_life(sealed=False)
    reader = again.join()
    again.damage(again.name(reader, at(chain(2, 50), 1)), PAYLOAD)
    assert reader.found(chain(2, 50)) == 1
    assert not again.plaintext(61)


def test_frames_are_sealed_and_no_digest_is_in_them() -> None:
    rig = DeepRig()
    fill(rig.join(), chain(2), word=0x1122334455667788)
    rig.settle()
    for kept in rig.below.blocks.values():
        assert bytes.fromhex("8877665544332211") not in kept.frames
        assert all(at(chain(2), n) not in kept.frames for n in range(2))


# what is told --------------------------------------------------------------------------------------------------------


def test_a_miss_is_evicted_only_if_it_is_below_no_more() -> None:
    rig = DeepRig(1, limit=6 * (SLOT + 2 * PAGE))
    engine = rig.join()
    fill(engine, chain(4))
    rig.settle()
    fill(engine, chain(8, 100))
    rig.settle()
    assert rig.stat("dict_evicted_blocks") == 6
    ticket = engine.ask(chain(1))
    rig.settle()
    assert engine.answer(ticket).reason == "evicted"
    assert engine.found(chain(8, 100)[-32:]) == 1


def test_stats_speak_of_the_tier_by_its_name() -> None:
    rig = written(2, 4)
    rig.join().found(chain(4))
    stats = rig.hierarchy.stats()
    assert stats["dict_bytes"] == 4 * (SLOT + 2 * PAGE)
    assert stats["dict_capacity_bytes"] == 1 << 30
    assert (stats["dict_reads_up"], stats["dict_blocks"], stats["dict_staging_blocks"]) == (1, 4, 0)
    assert (stats["dict_recalled_blocks"], stats["dict_recalled_bytes"]) == (4, 4 * SLOT)
    assert (stats["dict_recovered_blocks"], stats["dict_recall_seconds"]) == (4, 0.0)
    for name in (
        "dict_write_queue_bytes",
        "dict_device_written_bytes",
        "dict_evicted_blocks",
        "dict_reinserted_blocks",
    ):
        assert stats[name] == 0


def test_seconds_of_the_tier_are_those_from_call_to_answer() -> None:
    rig = written(2, 1)
    engine = rig.join()
    rig.faulty.faults = HUNG
    engine.ask(chain(1))
    rig.turns()
    rig.clock.advance(0.25)
    rig.faulty.release()
    rig.settle()
    assert rig.hierarchy.stats()["dict_recall_seconds"] == 0.25
    fill(engine, chain(1, 70))
    rig.clock.advance(0.5)
    rig.faulty.release()
    rig.settle()
    assert rig.hierarchy.stats()["dict_spill_seconds"] == 0.5


def test_a_well_without_a_tier_says_nothing_of_one() -> None:
    from lab.rig.members import Rig

    assert not [name for name in Rig(1 << 26, seed=1).hierarchy.stats() if name.startswith(("null", "disk"))]
