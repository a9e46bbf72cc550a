"""Recalls that are streams: offered while the tier is still read, copied as blocks land. Whatever happens in between,
the answer is right, comes within its limits, and nothing is held afterwards. Time is a set clock's."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="needs the engine")

from stepwell.client.patience import MAX_ALLOWED_S, STALL_S, TOTAL_S
from stepwell.client.questions import PrefixQuestion
from stepwell.engines.common.tasks import LoadTask
from stepwell.engines.paged.cpu import CpuCopies
from stepwell.hierarchy.local import LocalWell
from stepwell.protocol import messages as m
from stepwell.tiers.base import Incoming, ReadDone, Reading

from .local import late
from .slow import SlowEngine, slow_engine
from .test_faults import lose, rejoin
from .test_stats import total

BLOCK, TOKEN_BYTES = 256, 16
BLOCK_BYTES = BLOCK * TOKEN_BYTES
BLOCKS = 16
SMALL: dict[str, Any] = {"page": BLOCK, "layers": 1, "kv_heads": 1, "head_size": 2, "batch_tokens": 8192}
BLOCK_S, SLACK_S = 0.01, 0.03
STALL_LIMIT_S = STALL_S + MAX_ALLOWED_S


def prompt(blocks: int = BLOCKS, seed: int = 1) -> list[int]:
    """One token more, which is computed in any case."""
    return random.Random(seed).choices(range(32_000), k=blocks * BLOCK + 1)


@contextmanager
def streaming(
    folder: Path, *prompts: list[int], host: int = 4 * BLOCKS, ranks: int = 1, **fields: Any
) -> Iterator[SlowEngine]:
    """These prompts (one by default) are in the tier alone, which brings a block in BLOCK_S, one after the other.
    `host`: blocks that host memory holds."""
    sizes = SMALL | {"num_pages": 4 * (BLOCKS + 2), "ranks": ranks, "kv_heads": ranks} | fields
    with slow_engine(
        folder, host=(host + 1) * BLOCK_BYTES * ranks, block_bytes=BLOCK_BYTES * ranks, batch=1,
        extra={"block_tokens": BLOCK, **sizes.pop("extra", {})}, **sizes,
    ) as h:  # fmt: skip
        h.put_below(prompts or [prompt()])
        h.tier.block_s = BLOCK_S
        yield h
        h.tier.hung = False
        h.run_slowly()
        h.rest()
        h.assert_quiet()
        assert not h.client._streams and not h.half._recalls._streams


def under_way(h: SlowEngine, rank: int = 0) -> list[LoadTask]:
    """Streams that this rank copies, the earliest first."""
    steps = h.workers[rank].connector._work._steps
    return [task for step in steps for task in step.loads if task.load.limits is not None and not task.told]


def begun(h: SlowEngine, tokens: list[int], blocks: int = 4, **add: Any) -> str:
    """A request of whose stream so many blocks are in their pages."""
    rid = h.add(tokens, **add)
    h.run_until(lambda: any(task.load.request == rid and task.good >= blocks for task in under_way(h)))
    assert h.status(rid) == "WAITING_FOR_REMOTE_KVS"
    return rid


def receipt(h: SlowEngine, rid: str) -> dict[str, Any]:
    return (h.requests[rid].kv_transfer_params or {})["stepwell"]


def outcomes(h: SlowEngine) -> tuple[int, int]:
    """Streams that came whole, and those that fell short."""
    return h.counted("whole_streams"), h.counted("short_streams")


ORDERS: list[dict[str, Any]] = [{}, {"ranks": 2}, {"async_scheduling": True}, {"runner_v2": True}]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_blocks_are_copied_as_they_land(tmp_path: Path, order: dict[str, Any]) -> None:
    with streaming(tmp_path, **order) as h:
        rid = h.add(prompt(), max_tokens=3)
        seen: list[int] = []
        h.watch = lambda: seen.extend(task.good for task in under_way(h))
        came = h.clock.now()
        h.run_until_started(rid)
        assert h.clock.now() - came < 4 * BLOCK_S, "its pages are taken when the first block is there"
        h.run_slowly()
        assert sorted(set(seen)) == list(range(1, BLOCKS + 1))
        assert h.right(h.requests[rid]) and h.requests[rid].external == BLOCKS * BLOCK
        assert h.requests[rid].computed == 1 + 2
        assert receipt(h, rid)["recalled_tokens"] == BLOCKS * BLOCK
        assert receipt(h, rid)["tiers"] == {"host": 0, "disk": BLOCKS * BLOCK}
        assert receipt(h, rid)["recall_ms"] >= 1e3 * BLOCKS * BLOCK_S
        assert outcomes(h) == (1, 0)
        assert len(h.tier.asked) == len(set(h.tier.asked)) == BLOCKS


def test_blocks_are_copied_without_a_step_of_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a thread that is woken when they land."""
    monkeypatch.setattr("stepwell.engines.paged.lane.LOOK_S", 3600.0)
    with streaming(tmp_path, lanes=True) as h:
        rid = h.add(prompt(), max_tokens=3)
        h.run_until(lambda: bool(under_way(h)))
        task, patience = under_way(h)[0], time.monotonic() + 30
        while not task.job or not task.job.over:
            h.clock.advance(BLOCK_S)
            h.settle()
            time.sleep(0.001)
            assert time.monotonic() < patience
        assert task.good == BLOCKS and h.status(rid) == "WAITING_FOR_REMOTE_KVS"
        h.run_slowly()
        assert h.right(h.requests[rid]) and outcomes(h) == (1, 0)


def test_a_request_that_gives_way_as_it_is_offered_waits_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with streaming(tmp_path) as h:
        offer, post, before = h.client.offer, h.client._post, []

        def offered_too_late(ask: PrefixQuestion, *, streamed: bool = False) -> int:
            if before:
                return offer(ask, streamed=streamed)
            before.append(ask.blocks)
            (session,) = h.well.hierarchy.registry.sessions.values()
            session.requests[ask.ticket].asked_way = True
            posted: list[Any] = []
            with patch.object(h.client, "_post", lambda *message: bool(posted.append(message)) or True):
                h.client.received(m.GiveWay(ask.ticket), ())
            blocks = offer(ask, streamed=streamed)
            for message in posted:
                post(*message)
            return blocks

        monkeypatch.setattr(h.client, "offer", offered_too_late)
        rid = h.add(prompt(), max_tokens=3)
        h.run_slowly()
        assert before == [1]
        assert h.right(h.requests[rid]) and receipt(h, rid)["recalled_tokens"] == BLOCKS * BLOCK
        assert outcomes(h) == (1, 0)


def test_tokens_are_counted_by_the_tier_that_their_blocks_were_in(tmp_path: Path) -> None:
    """Blocks behind the first one from disk too, which the well says nothing of when the run is offered."""
    with streaming(tmp_path) as h:
        h.add(prompt())
        h.run_slowly()
        h.forget()
        for number, entry in reversed(list(enumerate(h.entries()))):
            if number not in (5, 6, 7):
                h.well.hierarchy.arena.drop(entry, "evicted")
        h.hits.clear()
        rid = h.add(prompt())
        h.run_slowly()
        expected = {"host": 3 * BLOCK, "disk": (BLOCKS - 3) * BLOCK}
        assert receipt(h, rid)["tiers"] == expected and h.hits in (expected, {})
        assert h.right(h.requests[rid]) and outcomes(h) == (2, 0)


def test_nothing_is_offered_before_the_tier_has_answered(tmp_path: Path) -> None:
    with streaming(tmp_path) as h:
        h.tier.hung = True
        rid = h.add(prompt())
        h.run_until_started(rid)
        assert not under_way(h)
        h.run_slowly()
        assert h.right(h.requests[rid]) and h.requests[rid].external == 0
        assert outcomes(h) == (0, 0)


def test_a_recall_may_begin_inside_a_block_that_the_engine_has_in_part(tmp_path: Path) -> None:
    """Pages of 128 tokens: the engine keeps the first of the prompt's."""
    with streaming(tmp_path, page=BLOCK // 2, num_pages=8 * BLOCKS) as h:
        h.serve(prompt()[: BLOCK // 2 + 1])
        rid = begun(h, prompt(), max_tokens=3)
        h.run_slowly()
        assert h.requests[rid].local == BLOCK // 2
        assert h.requests[rid].external == BLOCKS * BLOCK - BLOCK // 2
        assert h.right(h.requests[rid]) and outcomes(h) == (1, 0)


# what breaks in the middle --------------------------------------------------------------------------------------------


def hangs(h: SlowEngine) -> None:
    h.tier.hung = True


def fails(h: SlowEngine, answer: Reading = Reading.FAILED) -> None:
    def refuse(blocks: Sequence[Incoming], done: ReadDone) -> None:
        h.tier._executor.submit(lambda: None, lambda error: done([answer] * len(blocks)))

    h.tier.read = refuse  # type: ignore[method-assign]


def damages(h: SlowEngine) -> None:
    kept = dict(h.tier.blocks)
    for id, block in kept.items():
        frames = bytearray(block.frames)
        frames[len(frames) // 2] ^= 1
        h.tier.blocks[id] = type(block)(bytes(frames), block.segment, block.namespace)


def loses_all(h: SlowEngine) -> None:
    h.tier.blocks.clear()


@pytest.mark.parametrize("order", ORDERS[:3], ids=str)
@pytest.mark.parametrize("breaks", [hangs, fails, damages, loses_all], ids=lambda b: b.__name__)
def test_what_does_not_come_is_computed(
    tmp_path: Path, breaks: Callable[[SlowEngine], None], order: dict[str, Any]
) -> None:
    """At most one read is under way when the tier breaks, and may still come."""
    with streaming(tmp_path, **order) as h:
        rid = begun(h, prompt(), max_tokens=3)
        good, broke = min(task.good for task in under_way(h)), h.clock.now()
        breaks(h)
        h.run_until(lambda: h.status(rid) != "WAITING_FOR_REMOTE_KVS")
        assert h.clock.now() - broke <= STALL_LIMIT_S + 4 * BLOCK_S + SLACK_S
        h.tier.hung = False
        h.run_slowly()
        came = receipt(h, rid)["recalled_tokens"] // BLOCK
        counts = total(h)
        assert (counts["recalled_tokens/disk"], counts["streams/short"]) == (came * BLOCK, 1)
        assert sum(n for key, n in counts.items() if key.startswith("misses/")) == 1 + 1, "its first prompt was one too"
        assert good <= came < BLOCKS
        assert h.requests[rid].computed == len(prompt()) + 2 - came * BLOCK
        assert h.right(h.requests[rid]) and outcomes(h) == (0, 1)
        assert h.counted("failed_loads") == 0


def test_blocks_that_were_late_are_there_for_the_next(tmp_path: Path) -> None:
    with streaming(tmp_path) as h:
        rid = begun(h, prompt())
        h.tier.hung = True
        h.run_slowly()
        assert h.right(h.requests[rid]) and h.counted("missed_too_slow") == 1
        h.tier.hung = False
        h.clock.advance(10.0)
        h.rest()
        assert h.stat("disk_blocks") == BLOCKS
        again = h.recall(prompt())
        assert again.external == BLOCKS * BLOCK and h.right(again)


def test_a_tier_that_becomes_slow_is_waited_for_within_the_limits(tmp_path: Path) -> None:
    with streaming(tmp_path) as h:
        came = h.clock.now()
        rid = begun(h, prompt())
        h.tier.block_s = 10 * BLOCK_S
        h.run_slowly()
        assert h.clock.now() - came < TOTAL_S + SLACK_S
        assert h.right(h.requests[rid]) and sum(outcomes(h)) == 1


def test_a_tier_that_never_stands_still_has_the_total_limit(tmp_path: Path) -> None:
    with streaming(tmp_path, prompt(BLOCKS)) as h:
        h.tier.block_s = 0.2
        came, rid = h.clock.now(), h.add(prompt(), max_tokens=2)
        h.run_slowly()
        assert TOTAL_S <= h.clock.now() - came < TOTAL_S + SLACK_S
        assert h.right(h.requests[rid]) and outcomes(h) == (0, 1)
        assert receipt(h, rid)["recalled_tokens"] >= 8 * BLOCK


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_well_that_is_lost_leaves_what_has_come(tmp_path: Path, ranks: int) -> None:
    with streaming(tmp_path, ranks=ranks) as h:
        rid = begun(h, prompt(), max_tokens=3)
        good = min(task.good for rank in range(ranks) for task in under_way(h, rank))
        lose(h)
        h.run_slowly()
        assert h.right(h.requests[rid])
        assert h.requests[rid].computed == len(prompt()) + 2 - good * BLOCK
        rejoin(h)
        assert h.client.live


def test_a_well_that_says_nothing_more_is_waited_for_as_long_as_a_tier(tmp_path: Path) -> None:
    with streaming(tmp_path) as h:
        rid = begun(h, prompt(), max_tokens=3)
        good, wedged = under_way(h)[0].good, h.clock.now()
        with patch.object(LocalWell, "pump", lambda self: None):
            h.run_until(lambda: h.status(rid) != "WAITING_FOR_REMOTE_KVS")
            assert h.clock.now() - wedged <= STALL_LIMIT_S + SLACK_S
        h.run_slowly()
        assert h.right(h.requests[rid])
        assert h.requests[rid].computed == len(prompt()) + 2 - good * BLOCK


def test_a_slot_that_changes_while_it_is_read_is_no_good_block(tmp_path: Path) -> None:
    """And is dropped, or it would be offered again and again."""
    with streaming(tmp_path) as h:
        rid = begun(h, prompt(), max_tokens=3)
        copies = h.workers[0].connector._work._copies
        scatter, calls = copies.scatter, [0]

        def reused(shards: Any, after: Any) -> Any:
            calls[0] += 1
            if calls[0] == 3:
                slot = shards[0].slot
                entry = next(e for e in h.entries() if (e.slots[0][1], e.leases > 0) == (slot.number, True))
                entry.slots[0][0].renew(slot.number)
                slot.bytes[:] = 77
            return scatter(shards, after)

        good, copies.scatter = under_way(h)[0].good, reused
        h.run_slowly()
        assert h.right(h.requests[rid]) and h.counted("failed_loads") == 1
        assert h.requests[rid].computed == len(prompt()) + 2 - (good + 2) * BLOCK
        assert outcomes(h) == (0, 1)


# requests and engines that end in the middle --------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_an_abort_ends_the_stream(tmp_path: Path, order: dict[str, Any]) -> None:
    with streaming(tmp_path, **order) as h:
        rid = begun(h, prompt())
        h.abort(rid)
        for _ in range(6):
            h.step()
        assert h.request(rid) is None, "its pages are the engine's again"
        h.run_slowly()
        h.rest()
        assert len(h.tier.asked) < BLOCKS, "and nothing more is read for it"
        assert outcomes(h) == (0, 0)


def test_an_engine_that_falls_asleep_keeps_nothing_of_it(tmp_path: Path) -> None:
    with streaming(tmp_path) as h:
        rid = begun(h, prompt(), max_tokens=3)
        work = h.workers[0].connector._work
        h.workers[0].connector.unregister_kv_caches()
        assert all(task.job.over for task in under_way(h))
        with patch.object(CpuCopies, "scatter", side_effect=AssertionError("pages have no memory")):
            h.tier.tick()
            h.well.pump()
            work._streams.poll()
        h.workers[0].words[0][:] = 7
        h.workers[0].connector.restore_kv_caches()
        h.run_slowly()
        assert h.right(h.requests[rid]) and h.requests[rid].computed == len(prompt()) + 2
        assert h.counted("failed_loads") == 0


def test_a_request_that_is_preempted_after_its_stream_is_recalled_again(tmp_path: Path) -> None:
    with streaming(tmp_path) as h:
        rid = begun(h, prompt(), max_tokens=20)
        h.run_until(lambda: len(h.requests[rid].tokens) >= 5)
        h.preempt(rid)
        h.pool.reset_prefix_cache()
        h.run_slowly()
        assert h.right(h.requests[rid]) and h.requests[rid].preemptions == 1
        assert h.requests[rid].computed < 30


def test_an_engine_that_is_killed_leaves_nothing_held(tmp_path: Path) -> None:
    with streaming(tmp_path) as h:
        begun(h, prompt())
        links = [client.membership.outbox._link for client in (h.client, *h.worker_clients)]
        h.restart_engine(kill=True)
        for link in links:
            h.well.leave(link.member, exited=True)
        h.requests.clear()
        h.rest()
        again = h.add(prompt(), max_tokens=2)
        h.run_slowly()
        assert h.right(h.requests[again])


# several at once, and little room -------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [{}, {"ranks": 2}, {"ranks": 2, "kv_heads": 1}], ids=str)
def test_two_requests_stream_the_same_blocks(tmp_path: Path, order: dict[str, Any]) -> None:
    """Which are read once. Ranks may also hold the same."""
    with streaming(tmp_path, **order) as h:
        one = h.add(prompt(), max_tokens=3)
        other = h.add([*prompt()[:-1], *prompt(1, seed=7)], max_tokens=3)
        h.run_slowly()
        for rid in (one, other):
            assert h.right(h.requests[rid]) and h.requests[rid].external == BLOCKS * BLOCK
        assert len(h.tier.asked) == len(set(h.tier.asked)) == BLOCKS
        assert outcomes(h) == (2, 0)


def test_streams_whose_reports_are_lost_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.engines.vllm.scheduler.recalls.MAX_STREAMS", 1)
    prompts = [prompt(4, seed) for seed in range(4)]
    with streaming(tmp_path, *prompts) as h:
        h.hold(0)
        ids = [h.add(tokens) for tokens in prompts]
        h.run_until(lambda: h.started.keys() >= set(ids))
        assert len(h.half._recalls._streams) == len(h.client._streams) == 1
        h.release(0)
        h.run_slowly()
        assert all(h.right(h.requests[rid]) and h.requests[rid].computed == 1 for rid in ids)


def test_a_stream_keeps_no_other_recall_waiting(tmp_path: Path) -> None:
    """Neither one from host memory, nor the stream of blocks that come."""
    below = [prompt(seed=seed) for seed in (1, 2)]
    with streaming(tmp_path, *below, host=8 * BLOCKS) as h:
        h.add(here := prompt(2, seed=3))
        h.run_slowly()
        h.forget()
        first = begun(h, below[0])
        h.tier.hung = True
        second = h.add(here, max_tokens=2)
        h.run_until(lambda: h.requests[second].finish_reason is not None)
        assert h.requests[second].external == 2 * BLOCK and h.right(h.requests[second])
        assert h.status(first) == "WAITING_FOR_REMOTE_KVS"


@contextmanager
def small_host(folder: Path, blocks: int, ranks: int = 1, **fields: Any) -> Iterator[SlowEngine]:
    """A prompt in the tier, and host memory for a few blocks of it."""
    with streaming(folder, ranks=ranks) as first:
        tier = first.tier
    sizes = SMALL | {"num_pages": 2 * BLOCKS, "ranks": ranks, "kv_heads": ranks} | fields
    with slow_engine(
        folder, host=(blocks + 1) * BLOCK_BYTES * ranks, block_bytes=BLOCK_BYTES * ranks, batch=1, after=tier,
        extra={"block_tokens": BLOCK}, **sizes,
    ) as h:  # fmt: skip
        h.tier.block_s, h.tier.asked = BLOCK_S, []
        yield h
        h.rest()
        h.assert_quiet()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("window", [1, 2, 5])
def test_a_context_larger_than_host_memory_is_recalled_whole(tmp_path: Path, window: int, ranks: int) -> None:
    with small_host(tmp_path, window, ranks) as h:
        for _ in range(2):
            rid = h.add(prompt(), max_tokens=2)
            h.run_slowly()
            assert h.right(h.requests[rid]) and receipt(h, rid)["recalled_tokens"] == BLOCKS * BLOCK
            assert h.requests[rid].computed == 1 + 1
            h.forget()
        assert h.counted("short_streams") == 0 and h.counted("whole_streams") == 2


@pytest.mark.parametrize("blocks_a_step", [2, 8])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_context_larger_than_host_memory_is_spilled_whole(tmp_path: Path, ranks: int, blocks_a_step: int) -> None:
    """Its head stays, and what is behind that passes through, a part of a step at a time if need be."""
    with small_host(tmp_path, 5, ranks, batch_tokens=blocks_a_step * BLOCK) as h:
        other = prompt(seed=2)
        for recalled in (0, BLOCKS * BLOCK):
            rid = h.add(other, max_tokens=20)
            h.run_slowly()
            assert h.right(h.requests[rid]) and receipt(h, rid)["recalled_tokens"] == recalled
            h.rest()
            h.forget()


def test_a_rank_that_copies_nothing_holds_the_others_up_for_as_long_as_a_tier_that_hangs(tmp_path: Path) -> None:
    """No slot is free again, so that nothing more can land."""
    with small_host(tmp_path, 6, ranks=2) as h:
        slow = h.workers[1].connector._work._streams
        poll, slow.poll = slow.poll, lambda: None
        rid = h.add(prompt(), max_tokens=3)
        h.run_until(lambda: any(task.good >= 2 for task in under_way(h)))
        stuck = h.clock.now()
        h.run_until(lambda: not under_way(h))
        assert h.clock.now() - stuck <= STALL_LIMIT_S + 6 * BLOCK_S + SLACK_S
        assert h.status(rid) == "WAITING_FOR_REMOTE_KVS", "the other rank may still copy"
        slow.poll = poll
        h.run_slowly()
        came = receipt(h, rid)["recalled_tokens"] // BLOCK
        assert came < BLOCKS and h.requests[rid].computed == len(prompt()) + 2 - came * BLOCK
        assert h.right(h.requests[rid]) and outcomes(h) == (0, 1)


@pytest.mark.parametrize("block_s", [BLOCK_S, 0.25])
def test_an_offer_that_finds_no_pages_is_taken_when_there_are_some(tmp_path: Path, block_s: float) -> None:
    """However long that takes: the request waits for the engine, not for us."""
    with streaming(tmp_path, num_pages=BLOCKS + 8) as h:
        running = h.add(prompt(6, seed=2), max_tokens=50)
        h.run_until(lambda: len(h.requests[running].tokens) > 25)
        assert h.well.hierarchy.stack.levels[0].writes.idle
        h.tier.block_s, h.step_s = block_s, 0.1
        rid, came = h.add(prompt(), max_tokens=3), h.clock.now()
        h.run_slowly()
        assert h.started[rid] - came > TOTAL_S
        assert h.right(h.requests[rid]) and h.right(h.requests[running])
        assert receipt(h, rid)["recalled_tokens"] == BLOCKS * BLOCK
        assert h.counted("short_streams") == 0


# ranks and devices ----------------------------------------------------------------------------------------------------


def test_no_slot_is_let_go_before_the_slowest_rank_has_copied_it(tmp_path: Path) -> None:
    with streaming(tmp_path, ranks=2) as h:
        slow = h.workers[1].connector._work._streams
        poll, slow.poll = slow.poll, lambda: None
        rid = h.add(prompt(), max_tokens=3)
        h.run_until(lambda: any(task.good >= 4 for task in under_way(h)))
        assert h.stat("leased_blocks") >= 4
        slow.poll = poll
        h.run_slowly()
        assert h.right(h.requests[rid]) and h.requests[rid].computed == 1 + 2
        assert outcomes(h) == (1, 0)


def test_a_rank_that_cannot_copy_ends_the_stream_for_all(tmp_path: Path) -> None:
    with streaming(tmp_path, ranks=2) as h:
        rid = begun(h, prompt(), max_tokens=3)
        copies = h.workers[1].connector._work._copies
        good = min(task.good for task in under_way(h, 1))
        with patch.object(copies, "scatter", side_effect=OSError("on purpose")):
            h.run_until(lambda: h.status(rid) != "WAITING_FOR_REMOTE_KVS")
        h.run_slowly()
        assert h.right(h.requests[rid])
        assert h.requests[rid].computed == len(prompt()) + 2 - good * BLOCK
        assert outcomes(h) == (0, 1)


def test_a_slot_is_kept_until_the_device_has_copied_it(tmp_path: Path) -> None:
    """As on a GPU, which does nothing that nobody waits for."""
    with late(None), streaming(tmp_path) as h:
        h.settle()
        device = h.workers[0].connector._work._copies.device
        rid = h.add(prompt(), max_tokens=3)
        h.run_until(lambda: bool(under_way(h) and under_way(h)[0].begun))
        for _ in range(30):
            h.step()
        task = under_way(h)[0]
        (asked,) = [r for s in h.well.hierarchy.registry.sessions.values() for r in s.requests.values()]
        assert (task.good, task.idle, asked.freed) == (0, False, 0) and asked.told > 2
        h.abort(rid)
        for _ in range(5):
            h.step()
        assert h.request(rid) is not None, "its pages are being written"
        while h.busy():
            device.drain()
            h.step()


def test_a_device_brings_streams_to_their_end(tmp_path: Path) -> None:
    with late(3), streaming(tmp_path) as h:
        h.watch = lambda: [w.connector._work._copies.device.drain() for w in h.workers]
        rid = h.add(prompt(), max_tokens=3)
        h.run_slowly()
        assert h.right(h.requests[rid]) and h.requests[rid].computed == 1 + 2
        assert outcomes(h) == (1, 0)


def test_a_canary_waits_for_all_of_its_run(tmp_path: Path) -> None:
    with streaming(tmp_path, extra={"canary": 2}) as h:
        rids = []
        for _ in range(2):
            rids.append(h.add(prompt(), max_tokens=2))
            h.run_slowly()
            h.forget()
            for entry in reversed(h.entries()):
                h.well.hierarchy.arena.drop(entry, "evicted")
        assert [h.requests[rid].external for rid in rids] == [BLOCKS * BLOCK, 0]
        assert receipt(h, rids[1])["canary_tokens"] == BLOCKS * BLOCK
        assert h.stat("canaries_clean") == 1 and outcomes(h) == (1, 0)
