"""Recall or recompute in the well: one promise a test, with sessions played by hand over a tier of a told speed."""

from __future__ import annotations

import math

import msgspec
import pytest
from deep import DeepRig, at, chain, fill, written

from lab.rig.members import FakeEngine
from stepwell import events as e
from stepwell.hierarchy.sessions.decision import KEPT, DecisionLog
from stepwell.policies.costs.prefill import PrefillCost, pairs
from stepwell.policies.decide import UNKNOWN_LIMIT_S
from stepwell.policies.probe import PAUSE_S, PROBE_BYTES
from stepwell.protocol import messages as m
from stepwell.testing.arena_kit import SLOT

TOKENS = 128  # of a block
BLOCK_S = 0.1  # to compute it


def timed(engine: FakeEngine, block_s: float = BLOCK_S) -> None:
    """The engine computes a block's tokens in so many seconds."""
    steps = [(TOKENS * n, pairs(TOKENS * n, 0), block_s * n) for n in (1, 2, 4, 8)] * 8
    engine.scheduler.say(m.Timings(steps, [(SLOT, 1e-4)] * 8))


def tier_takes(rig: DeepRig, block_s: float) -> None:
    """The tier has just been seen to read a block in so many seconds."""
    for n in range(1, 33):
        rig.level.reads.speed.read(SLOT * (1 + n % 4), block_s * (1 + n % 4), 1.0)


def asked(engine: FakeEngine, digests: bytes, **how: str) -> tuple[int, m.Found]:
    """Blocks found, and the last thing said."""
    ticket = engine.ask(digests, **how)  # type: ignore[arg-type]
    engine.rig.settle()
    found = [message for message in engine.scheduler.take(m.Found) if message.ticket == ticket]
    engine.scheduler.say(m.Release(ticket, 0.5))
    engine.rig.settle()
    return sum(len(message.sources) for message in found), found[-1]


def judged(block_s: float, blocks: int = 16) -> tuple[DeepRig, FakeEngine, bytes]:
    rig = written(16, blocks)
    engine = rig.join()
    timed(engine)
    tier_takes(rig, block_s)
    return rig, engine, chain(blocks)


def test_a_tier_that_is_faster_than_computing_is_read() -> None:
    rig, engine, digests = judged(BLOCK_S / 4)
    blocks, last = asked(engine, digests)
    assert (blocks, last.more, last.reason) == (16, False, "end")
    assert last.limit_s == pytest.approx(16 * BLOCK_S, rel=0.2)
    assert rig.stat("decided_worth_it") == 1


def test_a_tier_that_is_slower_than_computing_is_left_alone() -> None:
    rig, engine, digests = judged(BLOCK_S * 4)
    blocks, last = asked(engine, digests)
    assert (blocks, last.more, last.reason) == (0, False, "recompute_cheaper")
    assert rig.asked == []
    assert rig.stat("decided_recompute_cheaper") == 1
    assert rig.stat("misses_recompute_cheaper") == 16


def test_what_is_in_the_arena_is_taken_and_the_rest_left() -> None:
    rig, engine, digests = judged(BLOCK_S * 4)
    engine.spill(digests[: 32 * 5])
    blocks, last = asked(engine, digests)
    assert (blocks, last.reason) == (5, "recompute_cheaper")
    assert rig.asked == []


def test_what_a_run_waited_for_does_not_keep_the_rest_from_being_weighed() -> None:
    rig, engine, digests = judged(BLOCK_S * 4)
    engine.spill(digests[: 32 * 4])
    leases, _ = engine.reserve(at(digests, 4), parent=at(digests, 3))
    ticket = engine.ask(digests)
    rig.settle()
    assert engine.answer(ticket).reason == "filling"
    engine.workers[0].say(m.Filled(leases, []))
    rig.settle()
    said = engine.answer(ticket)
    assert (len(said.refs), said.reason) == (5, "recompute_cheaper")
    assert rig.asked == []
    engine.release(ticket)


def test_modes_of_a_request_go_before_the_wells() -> None:
    _, engine, digests = judged(BLOCK_S * 4)
    assert asked(engine, digests, recall="always")[0] == 16
    _rig, engine, digests = judged(BLOCK_S / 4)
    blocks, last = asked(engine, digests, recall="never")
    assert (blocks, last.more, last.reason) == (0, False, "never")
    assert asked(engine, digests, recall="nonsense")[0] == 16
    assert asked(engine, digests, recall="never")[0] == 0, "though they are in the arena"


def test_until_something_is_known_everything_is_recalled() -> None:
    rig = written(4, 16)
    engine = rig.join()
    blocks, last = asked(engine, chain(16))
    assert (blocks, last.limit_s) == (16, UNKNOWN_LIMIT_S)
    assert rig.stat("decided_unknown") == 1


def test_what_others_wait_for_counts() -> None:
    """Alone each would be recalled; the third would wait for the two before it longer than it computes, and the fourth
    would wait for both as long, but longer for the third's computing and its own."""
    starts = (0, 1000, 2000, 3000)
    rig = written(16, 64, digests=b"".join(chain(16, start) for start in starts))
    engine = rig.join()
    timed(engine)
    tier_takes(rig, BLOCK_S / 2.5)
    rig.faulty.faults = rig.faulty.faults.__class__(hang=1.0)
    tickets = [engine.ask(chain(16, start)) for start in starts]
    rig.turns()
    reasons = [engine.answer(ticket).reason for ticket in tickets]
    assert reasons == ["staging", "staging", "recompute_cheaper", "staging"]
    rig.faulty.faults = rig.faulty.faults.__class__()
    rig.faulty.release()
    rig.settle()


def test_a_tier_that_was_refused_is_probed_for_nobody() -> None:
    rig, engine, digests = judged(BLOCK_S * 4)
    assert asked(engine, digests)[0] == 0
    rig.clock.advance(PAUSE_S)
    ticket = engine.ask(digests)
    rig.turns()
    said = engine.answer(ticket)
    assert (len(said.refs), said.more, said.reason) == (0, False, "recompute_cheaper"), "it does not wait for the probe"
    engine.release(ticket)
    rig.settle()
    assert sum(map(len, rig.asked)) == PROBE_BYTES // SLOT
    before = len(rig.asked)
    assert asked(engine, digests[32 * 4 :])[0] == 0
    assert len(rig.asked) == before, "not again so soon"


def test_probes_find_out_that_a_tier_has_become_faster() -> None:
    rig, engine, digests = judged(BLOCK_S * 4)
    for _ in range(40):
        rig.clock.advance(60.0)
        asked(engine, digests)
        if rig.asked:
            tier_takes(rig, BLOCK_S / 100)
        if rig.stat("decided_worth_it"):
            return
    raise AssertionError("it was never read again")


def test_a_recall_that_has_become_too_slow_is_given_up_with_what_has_landed() -> None:
    rig, engine, digests = judged(BLOCK_S / 4, blocks=48)
    ticket = engine.ask(digests)
    rig.turns()
    assert engine.answer(ticket).more is True
    tier_takes(rig, BLOCK_S * 4)
    while engine.answer(ticket).more:
        rig.executor.step()
        rig.turns()
    said = engine.answer(ticket)
    assert said.reason == "late"
    assert 0 < len(said.refs) < 48
    engine.recall(ticket)
    assert rig.stat("gave_up_late") == 0, "it did not wait"
    rig.settle()


def test_a_recall_in_time_is_not_given_up() -> None:
    _rig, engine, digests = judged(BLOCK_S / 4, blocks=48)
    assert asked(engine, digests)[0] == 48


def outcome(rig: DeepRig) -> e.RecallEnded:
    ended = rig.hierarchy.decisions.latest(1)[0][1]
    assert ended is not None
    return ended


def test_regret_is_what_the_best_choice_would_have_saved() -> None:
    rig, engine, digests = judged(BLOCK_S / 4)
    ticket = engine.ask(digests, tokens=16 * TOKENS + 8)
    rig.settle()
    engine.scheduler.say(m.Recall(ticket, 1, 0, 16, False, 0.5))
    ended = outcome(rig)
    assert (ended.recalled, ended.gave_up, ended.waited_s) == (16, "", 0.5)
    assert ended.best_s is not None and ended.regret_s is not None
    assert ended.best_s == pytest.approx(16 * BLOCK_S / 4 + BLOCK_S / 16, rel=0.3)
    assert ended.regret_s == pytest.approx(0.5 + BLOCK_S / 16 - ended.best_s, abs=0.05)
    assert rig.stat("decision_best_seconds") == int(ended.best_s)
    engine.recalled(1)


def test_a_recall_that_brought_less_than_it_should_was_given_up() -> None:
    rig, engine, digests = judged(BLOCK_S / 4)
    asked(engine, digests)
    ended = outcome(rig)
    assert (ended.recalled, ended.gave_up) == (0, "limit")
    assert ended.regret_s is not None and ended.regret_s > BLOCK_S


def test_blocks_that_the_engine_has_itself_are_not_given_up() -> None:
    """It takes what lies behind its own hit."""
    rig, engine, digests = judged(BLOCK_S / 4)
    ticket = engine.ask(digests, tokens=16 * TOKENS + 8)
    rig.settle()
    engine.scheduler.say(m.Recall(ticket, 1, 4, 12, False, 0.5))
    assert (outcome(rig).recalled, outcome(rig).gave_up) == (16, "")
    engine.recalled(1)


def test_what_an_engine_did_not_need_is_nobodys_regret() -> None:
    rig, engine, digests = judged(BLOCK_S / 4)
    ticket = engine.ask(digests)
    rig.settle()
    engine.release(ticket)
    assert outcome(rig).regret_s is None
    assert outcome(rig).gave_up == ""


def test_groups_that_were_not_named_are_left_out_of_what_is_missing() -> None:
    rig, engine, digests = judged(BLOCK_S / 4)
    ticket = engine.ask(digests)
    rig.settle()
    engine.scheduler.say(m.Release(ticket, 0.5, no_place=m.NoPlace(16, 3, 1, [(9, 3), (-1, 2)])))
    ended = outcome(rig)
    assert ended.no_place == e.PlaceMissed(16, 3, 1, ())
    assert (ended.gave_up, ended.regret_s) == ("no_place", None), "it was not for the well to decide"


@pytest.mark.parametrize("waited", [math.nan, -1.0, math.inf])
def test_a_wait_that_cannot_be_is_none(waited: float) -> None:
    rig, engine, digests = judged(BLOCK_S / 4)
    ticket = engine.ask(digests)
    rig.settle()
    engine.scheduler.say(m.Release(ticket, waited))
    assert outcome(rig).waited_s == 0


def test_timings_that_cannot_be_change_nothing() -> None:
    _rig, engine, digests = judged(BLOCK_S / 4)
    engine.scheduler.say(m.Timings([(-1, 1.0, 1.0), (1, math.nan, 1.0), (1, 1.0, math.inf)] * 20, [(0, 0.0)] * 20))
    assert asked(engine, digests)[0] == 16


def test_more_timings_than_there_may_be_end_the_session() -> None:
    rig = DeepRig()
    engine = rig.join()
    engine.scheduler.say(m.Timings([(1, 1.0, 1.0)] * (m.MAX_TIMINGS + 1), []))
    assert engine.scheduler.take(m.Refused)[0].code == "SW-802"
    assert not engine.live


def test_namespaces_are_learned_apart_and_remembered() -> None:
    rig = DeepRig()
    engine = rig.join()
    timed(engine)
    (tag, cost), *others = rig.hierarchy.costs.learned.items()
    assert not others
    assert cost.seconds(TOKENS) == pytest.approx(BLOCK_S, rel=0.1)
    rig.hierarchy.costs.heard(b"another", [(TOKENS, pairs(TOKENS, 0), 9.0)] * 8, [])
    assert rig.hierarchy.costs.learned[tag] == cost
    assert list(rig.hierarchy.costs.learned) == [tag, b"another"]


def test_an_epoch_of_weights_costs_what_the_one_before_did() -> None:
    rig, engine, digests = judged(BLOCK_S * 4)
    fill(engine, digests, epoch=7)
    rig.settle()
    for entry in list(rig.hierarchy.index.values()):
        rig.hierarchy.arena.drop(entry, "cleared")
    ticket = engine.ask(digests, epoch=7)
    rig.settle()
    assert engine.answer(ticket).reason == "recompute_cheaper"
    engine.release(ticket)


def test_an_engine_of_the_protocol_before_is_weighed_too() -> None:
    """It says neither how long its prompts are nor how long it waits, and times nothing."""
    rig = written(4, 16)

    class Old(FakeEngine):
        def scheduler_hello(self, protocol: int = m.PROTOCOL - 1) -> m.Hello:
            return super().scheduler_hello(protocol)

    engine = Old(rig)
    rig.settle()
    ask = msgspec.msgpack.decode(msgspec.msgpack.encode(["Ask", 5, 0, 1, chain(16)]), type=m.Ask)
    engine.scheduler.say(ask)
    rig.settle()
    assert len(engine.answer(5).refs) == 16
    release = msgspec.msgpack.decode(msgspec.msgpack.encode(["Release", 5]), type=m.Release)
    engine.scheduler.say(release)
    rig.settle()


@pytest.mark.parametrize(("depth", "worth"), [(0, 0), (40, 40), (-3, 0), (1 << 62, m.MAX_DIGESTS)])
def test_parts_of_a_tail_are_worth_what_lies_before_them(depth: int, worth: int) -> None:
    """Without them all of it is computed again. Where nothing is said they are like a prompt's first blocks."""
    rig = DeepRig(8)
    engine = rig.join()
    engine.reserve(chain(3), depth=depth)
    depths = [entry.history.depth for entry in rig.hierarchy.index.values()]
    assert depths == ([worth] * 3 if worth else [0, 1, 2])


def test_a_tail_that_comes_from_a_tier_is_worth_what_its_prefix_is() -> None:
    rig = written(16, 16)
    engine = rig.join()
    prefix = engine.ask(chain(13))
    rig.settle()
    tail = engine.number()
    engine.scheduler.say(m.Ask(tail, 0, 1, chain(16)[32 * 13 :], 0, "always", prefix))
    rig.settle()
    assert len(engine.answer(tail).refs) == 3
    depths = [entry.history.depth for entry in rig.hierarchy.index.values()]
    assert sorted(depths) == [*range(13), 13, 13, 13]


def test_an_older_well_understands_what_is_new_of_groups() -> None:
    """It knows fewer fields of a message, and leaves the others out."""

    class Ask(msgspec.Struct, array_like=True, tag=True):
        ticket: int
        epoch: int
        order: int
        digests: bytes
        tokens: int = 0
        recall: str = ""

    class Release(msgspec.Struct, array_like=True, tag=True):
        ticket: int
        waited_s: float = 0.0
        waits: bool = False

    class Row(msgspec.Struct, array_like=True):
        tag: bytes
        tenant: str
        engines: list[str]
        blocks: int
        nbytes: int

    group = m.CacheGroup("sliding_window", 1, 1, 1, "float32", 16, 16, 512, 64)
    for message, known in (
        (m.Ask(5, 0, 1, bytes(32), 9, "always", 4), Ask(5, 0, 1, bytes(32), 9, "always")),
        (m.Release(5, 0.5, no_place=m.NoPlace(3, 2, 1, [(1, 2)])), Release(5, 0.5)),
        (m.NamespaceRow(b"t", "", [], 1, 2, groups=[group]), Row(b"t", "", [], 1, 2)),
    ):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(known)) == known


def test_the_last_decisions_are_kept_and_no_more() -> None:
    decisions = DecisionLog()
    for number in range(KEPT + 5):
        decisions(e.RecallDecided(number, 0.0, 1, 1, {}, {}, 0, "worth_it", 1.0))
    decisions(e.RecallEnded(3, 1, 1.0, 1.0, ""))
    assert len(decisions.latest(10 * KEPT)) == KEPT
    assert decisions.latest(1)[0][0].number == KEPT + 4
    assert decisions.latest(-1) == []


def test_a_calibration_of_an_earlier_well_is_used(tmp_path: object) -> None:
    rig = written(4, 16)
    engine = rig.join()
    assert engine.scheduler.member is not None
    tag = engine.scheduler.member.session.origins(0)[0].tag
    rig.hierarchy.costs._earlier[tag] = PrefillCost(0.0, BLOCK_S / TOKENS, 0.0)
    tier_takes(rig, BLOCK_S * 4)
    assert asked(engine, chain(16))[1].reason == "recompute_cheaper"


def test_a_block_of_the_run_that_is_gone_meanwhile_is_only_a_miss() -> None:
    rig, engine, digests = judged(BLOCK_S / 4)
    rig.below.drop(rig.name(engine, at(digests, 9)))
    blocks, last = asked(engine, digests)
    assert (blocks, last.reason) == (9, "never_seen")
