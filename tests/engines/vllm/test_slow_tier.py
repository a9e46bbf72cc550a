"""Waiting for a tier: who waits how long, and that nobody's blocks are lost meanwhile. Time is a set clock's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the engine")

from stepwell.client.patience import MAX_ALLOWED_S, STALL_S
from stepwell.engines.vllm.connector import HOST
from stepwell.hierarchy.arena.records import Entry
from stepwell.hierarchy.levels.breaker import OVERDUE_S
from stepwell.tiers.base import Incoming, Outgoing, ReadDone, Reading, WriteDone, Writing

from .slow import SlowEngine, slow_engine

PAGE = 256
TOKEN_BYTES = 16
SMALL: dict[str, Any] = {"page": PAGE, "layers": 1, "kv_heads": 1, "head_size": 2, "batch_tokens": 8192}
"""Engines whose KV is 16 bytes a token: time is what is looked at here, and bytes are few."""


def prompts(count: int, length: int) -> list[list[int]]:
    rng = random.Random(count)
    return [rng.choices(range(32_000), k=length) for _ in range(count)]


class Pins:
    """Looks at the well whenever it has moved. `evicted`: blocks that went before they were copied."""

    def __init__(self, h: SlowEngine) -> None:
        self.hierarchy = h.well.hierarchy
        self.most = self.evicted = 0
        h.watch = self.look
        dropped = self.hierarchy.arena._observer.dropped

        def noted(entry: Entry, reason: str) -> None:
            if reason in ("evicted", "retired"):
                self.evicted += any(entry in ticket.pinned[ticket.freed :] for ticket in self.tickets())
            dropped(entry, reason)

        object.__setattr__(self.hierarchy.arena._observer, "dropped", noted)

    def tickets(self) -> list[Any]:
        return [ticket for s in self.hierarchy.registry.sessions.values() for ticket in s.requests.values()]

    def look(self) -> None:
        pinned, limits = self.hierarchy.arena.pinned_bytes, self.hierarchy.limits
        self.most = max(self.most, pinned)
        assert pinned <= 0.5 * limits.host_bytes


def test_a_long_queue_does_not_lose_what_was_staged_for_it(tmp_path: Path) -> None:
    """32 requests of 16K tokens, in an arena of a fifth of their KV, over a tier that is six times as fast as
    computing them. Blocks come up once each, in the order in which they are needed."""
    count, length, block = 32, 16 * 1024, 512
    kv = count * length * TOKEN_BYTES
    below = prompts(count, length)
    with slow_engine(
        tmp_path, host=kv // 5, block_bytes=block * TOKEN_BYTES, extra={"block_tokens": block},
        num_pages=10 * (length // PAGE + 2) + 1, max_seqs=256, max_model_len=length + PAGE, **SMALL,
    ) as h:  # fmt: skip
        h.put_below(below)
        assert h.stat("disk_blocks") == count * length // block
        compute_s, recall_s = 1.2, 0.2
        h.token_s, h.step_s, h.idle_s = compute_s / length, 0.02, 0.005
        h.tier.block_s, h.tier.latency_s = recall_s / (length // block), 0.002
        pins, began = Pins(h), h.clock.now()
        ids = [h.add(tokens, max_tokens=2) for tokens in below]
        h.run_slowly()
        took = h.clock.now() - began
        recalled = sum(h.requests[rid].external for rid in ids) / (count * length)
        reads = len(h.tier.asked) / len(set(h.tier.asked))
        print(f"recalled {recalled:.3f}, reads per block {reads:.3f}, {took:.1f} s, most pinned "
              f"{pins.most / h.well.hierarchy.limits.host_bytes:.3f} of host, {h.steps} steps")  # fmt: skip
        assert all(h.right(h.requests[rid]) for rid in ids)
        assert pins.evicted == 0
        assert reads < 1.02
        assert recalled > 0.98
        assert took < 1.1 * count * recall_s
        h.assert_quiet()


def queue(folder: Path, count: int, length: int = 8192, **fields: Any) -> Any:
    """A smaller one, of blocks of 256 tokens; the arena holds a quarter of the KV, but not less than four prompts."""
    return slow_engine(
        folder, host=max(count // 4, 4) * length * TOKEN_BYTES, block_bytes=256 * TOKEN_BYTES,
        extra={"block_tokens": 256}, **{**SMALL, "num_pages": 8 * (length // PAGE + 1) + 1, "max_seqs": 64, **fields},
    )  # fmt: skip


def test_a_request_that_the_engine_cannot_take_yet_loses_no_patience(tmp_path: Path) -> None:
    """Four run at a time, for seconds; what waits behind them is staged when its turn comes."""
    with queue(tmp_path, 16, max_seqs=4, num_pages=4 * 34 + 1) as h:
        below = prompts(16, 8192)
        h.put_below(below)
        h.tier.block_s, h.step_s, h.token_s = 0.2 / 32, 0.1, 1e-4
        pins = Pins(h)
        ids = [h.add(tokens, max_tokens=40) for tokens in below]
        h.run_slowly()
        assert [h.requests[rid].external for rid in ids] == [8192] * 16
        assert len(h.tier.asked) == len(set(h.tier.asked))
        assert pins.evicted == 0
        assert all(h.right(h.requests[rid]) for rid in ids)
        h.assert_quiet()


def test_a_tier_that_is_too_slow_is_waited_for_once(tmp_path: Path) -> None:
    """It never stands still for long enough to be given up, but the first request has its time and the others share
    it: they do not each wait in turn."""
    with queue(tmp_path, 16, num_pages=20 * 33 + 1) as h:
        below = prompts(16, 8192)
        h.put_below(below)
        h.tier.block_s, h.token_s = 0.1, 0.1 / 8192
        began = h.clock.now()
        ids = [h.add(tokens) for tokens in below]
        h.run_slowly()
        total = h.client._patience.total_s
        assert all(h.right(h.requests[rid]) for rid in ids)
        assert max(h.started.values()) - began < total + 16 * 0.1 + 16 * (h.step_s + h.idle_s)
        h.rest()
        h.assert_quiet()


# many at once ---------------------------------------------------------------------------------------------------------


def arriving(folder: Path, sizes: Sequence[tuple[float, int]], host: int) -> tuple[list[float], int]:
    """Prompts of so many tokens that come at these moments and lie in a tier that reads 20,480 tokens a second; `host`
    is in tokens. Returns how long each waited for its first token, and the tokens that were recalled."""
    rng, total = random.Random(7), sum(size for _, size in sizes)
    below = [rng.choices(range(32_000), k=size) for _, size in sizes]
    fields: dict[str, Any] = {
        "block_bytes": 256 * TOKEN_BYTES, "extra": {"block_tokens": 256}, **SMALL,
        "num_pages": 2 * total // PAGE, "max_seqs": 64, "max_model_len": 33 * 1024,
    }  # fmt: skip
    with slow_engine(folder / "first", host=4 * total * TOKEN_BYTES, **fields) as h:
        h.put_below(below)
        tier = h.tier
    with slow_engine(folder / "second", host=host * TOKEN_BYTES, after=tier, **fields) as h:
        h.tier.block_s, h.tier.latency_s = 256 / 20480, 0.001
        h.step_s, h.token_s, h.idle_s = 0.01, 0.5 / 8192, 0.005
        began, ids, took = h.clock.now(), [], {}
        while len(ids) < len(sizes) or h.busy():
            while len(ids) < len(sizes) and h.clock.now() - began >= sizes[len(ids)][0]:
                ids.append(h.add(below[len(ids)], max_tokens=1))
            h.step()
            for rid, (at, _) in zip(ids, sizes, strict=False):
                if h.requests[rid].finish_reason:
                    took.setdefault(rid, h.clock.now() - began - at)
        assert all(h.right(h.requests[rid]) for rid in ids)
        assert len(h.tier.asked) == len(set(h.tier.asked)), "each block once"
        receipts = [(h.requests[rid].kv_transfer_params or {})["stepwell"] for rid in ids]
        h.rest()
        h.assert_quiet()
        return [took[rid] for rid in ids], sum(receipt["recalled_tokens"] for receipt in receipts)


@pytest.mark.parametrize("host", [128 * 1024, 24 * 1024])
def test_short_prompts_pass_a_long_one_and_nobody_computes(tmp_path: Path, host: int) -> None:
    sizes = [(0.0, 32 * 1024)] + [(0.0, 2048)] * 8
    took, recalled = arriving(tmp_path, sizes, host)
    assert recalled == 48 * 1024
    for n, short in enumerate(took[1:]):
        assert short < 0.1 * (n + 1) + 0.15, "those that came before it, and what was asked for when it came"
    assert took[0] < 48 / 20 + 0.2


@pytest.mark.parametrize("host", [256 * 1024, 24 * 1024])
def test_long_prompts_are_not_starved_by_short_ones(tmp_path: Path, host: int) -> None:
    """Short ones keep the tier busy for three seconds: the long ones wait as if they shared it at most."""
    sizes = [(0.0, 32 * 1024)] * 2 + [(0.1 * n, 2048) for n in range(1, 31)]
    took, recalled = arriving(tmp_path, sizes, host)
    assert recalled == (2 * 32 + 30 * 2) * 1024
    assert max(took[2:]) < 3.2 and sum(took[2:]) / 30 < 0.5
    assert took[0] < 5.0 and took[1] < 6.5


@pytest.mark.parametrize("host", [4096, 8192])
def test_four_that_come_together_wait_for_each_others_room(tmp_path: Path, host: int) -> None:
    """Reads for others say that the line moves, and nobody is asked to give way to one that is not before it."""
    took, recalled = arriving(tmp_path, [(0.0, 8192)] * 4, host)
    assert recalled == 4 * 8192
    assert max(took) < 4 * 0.4 + 0.3


# a tier that hangs or fails -------------------------------------------------------------------------------------------

STALL_LIMIT_S = STALL_S + MAX_ALLOWED_S  # nothing is known of how long healthy reads take
SLACK_S = 0.010


class Broken:
    """The tier hangs, or says no at once."""

    def __init__(self, h: SlowEngine, how: str) -> None:
        self.h = h
        if how == "hangs":
            h.tier.hung = True
        else:
            h.tier.read = self.refuse  # type: ignore[method-assign]

    def refuse(self, blocks: Sequence[Incoming], done: ReadDone) -> None:
        self.h.tier._executor.submit(lambda: None, lambda error: done([Reading.FAILED] * len(blocks)))


def added(h: SlowEngine, tokens: list[int]) -> float:
    """Seconds from a request's coming to its start."""
    came = h.clock.now()
    rid = h.add(tokens)
    h.run_until_started(rid)
    return h.started[rid] - came


@pytest.mark.skipif(HOST is None, reason="vLLM before 0.32 does not ask")
def test_vllm_counts_hits_by_the_tier_that_had_them(tmp_path: Path) -> None:
    with queue(tmp_path, 1, 4096) as h:
        h.put_below(below := prompts(1, 4096))
        assert not h.hits, "computed"
        for tokens, sources in ((2048, {"disk": 2048}), (2048, {"host": 2048}), (4096, {"host": 2048, "disk": 2048})):
            h.hits.clear()
            h.forget()
            rid = h.add(below[0][:tokens])
            h.run_slowly()
            assert h.requests[rid].external == tokens
            assert h.hits == sources
        h.assert_quiet()


@pytest.mark.parametrize(("how", "limit"), [("hangs", STALL_LIMIT_S), ("fails", 0.0)])
def test_what_a_broken_tier_adds_to_a_lone_request(tmp_path: Path, how: str, limit: float) -> None:
    with queue(tmp_path, 4) as h:
        below = prompts(4, 8192)
        h.put_below(below)
        Broken(h, how)
        first = added(h, below[0])
        assert limit <= first <= limit + SLACK_S
        h.run_slowly()
        h.clock.advance(OVERDUE_S)
        assert added(h, below[1]) <= SLACK_S, "by now the well knows"
        h.run_slowly()
        assert h.stat("misses_not_readable") == (64 if how == "fails" else 0)
        assert h.stat("misses_tier_down") == (0 if how == "fails" else 32)
        assert all(h.right(outcome) for outcome in h.requests.values())
        one, other = [(outcome.kv_transfer_params or {})["stepwell"] for outcome in h.requests.values()][-2:]
        assert 1e3 * limit <= one["wait_ms"] <= 1e3 * (limit + SLACK_S), "a miss tells that it has waited in vain"
        assert other["wait_ms"] <= 1e3 * SLACK_S
        h.tier.hung = False
        h.rest()
        h.assert_quiet()


@pytest.mark.parametrize(("how", "limit"), [("hangs", STALL_LIMIT_S), ("fails", 0.0)])
def test_what_a_broken_tier_adds_while_others_run(tmp_path: Path, how: str, limit: float) -> None:
    with queue(tmp_path, 4) as h:
        below = prompts(4, 8192)
        h.put_below(below)
        running = h.add(prompts(1, 300)[0], max_tokens=60)
        h.step_s = 0.04
        for _ in range(4):
            h.step()
        Broken(h, how)
        assert added(h, below[0]) <= limit + SLACK_S + h.step_s
        h.run_slowly()
        assert h.right(h.requests[running])
        h.tier.hung = False
        h.rest()
        h.assert_quiet()


@pytest.mark.parametrize(("how", "limit"), [("hangs", STALL_LIMIT_S), ("fails", 0.0)])
def test_what_a_broken_tier_adds_to_a_queue(tmp_path: Path, how: str, limit: float) -> None:
    """All wait at the same time, not one after the other, whether they have pins or wait for them."""
    with queue(tmp_path, 16, num_pages=20 * 33 + 1, batch_tokens=16 * 8192) as h:
        below = prompts(16, 8192)
        h.put_below(below)
        Broken(h, how)
        came = h.clock.now()
        ids = [h.add(tokens) for tokens in below]
        h.run_slowly()
        assert max(h.started[rid] for rid in ids) - came <= limit + SLACK_S + h.step_s
        assert all(h.right(h.requests[rid]) for rid in ids)
        h.tier.hung = False
        h.rest()
        h.assert_quiet()


@pytest.mark.parametrize("every_s", [0.0, 0.02, 0.25])
def test_a_hung_tier_holds_no_request_while_others_recall_from_host_memory(tmp_path: Path, every_s: float) -> None:
    """Hits of later requests say nothing of the blocks that do not come. `every_s`: one of them comes; 0: none does."""
    count, block = 40, 256
    with slow_engine(
        tmp_path, host=(count + 64) * 2 * 1024 * TOKEN_BYTES, block_bytes=block * TOKEN_BYTES,
        extra={"block_tokens": block}, num_pages=129, max_seqs=64, **SMALL,
    ) as h:  # fmt: skip
        below, in_host = prompts(1, 1024), prompts(count, 513)
        h.put_below(below)
        for tokens in in_host:
            h.add(tokens)
            h.run_slowly()
            h.settle()
        h.forget()
        h.tier.hung = True
        came, served = h.clock.now(), 0
        waiting = h.add(below[0], max_tokens=1)
        due = came
        while waiting not in h.started and h.clock.now() - came < 60.0:
            if every_s and h.clock.now() >= due:
                h.add(in_host[served % count], max_tokens=1)
                served, due = served + 1, h.clock.now() + every_s
            h.step()
        assert waiting in h.started
        assert h.started[waiting] - came <= STALL_LIMIT_S + SLACK_S + h.step_s
        h.run_slowly()
        assert all(h.right(outcome) for outcome in h.requests.values())
        assert served == sum(h.requests[rid].external == 512 for rid in h.started if rid > waiting) or not every_s
        h.tier.hung = False
        h.rest()
        h.assert_quiet()


def test_a_tier_that_hangs_half_way_keeps_what_has_landed(tmp_path: Path) -> None:
    with queue(tmp_path, 4) as h:
        below = prompts(4, 8192)
        h.put_below(below)
        h.tier.block_s = 0.4 / 32
        rid = h.add(below[0])
        while h.clock.now() < 1000.2:
            h.step()
        h.tier.hung = True
        hung = h.clock.now()
        while h.status(rid) == "WAITING_FOR_REMOTE_KVS":
            h.step()
        assert h.clock.now() - hung <= STALL_LIMIT_S + SLACK_S
        h.run_slowly()
        recalled = (h.requests[rid].kv_transfer_params or {})["stepwell"]["recalled_tokens"]
        assert 0 < recalled < 8192 and h.requests[rid].computed == 8192 - recalled
        assert h.right(h.requests[rid])
        h.tier.hung = False
        h.rest()
        h.assert_quiet()


@pytest.mark.parametrize("answer", [Writing.FULL, Writing.FAILED])
def test_a_disk_that_takes_nothing_costs_nothing_but_its_blocks(tmp_path: Path, answer: Writing) -> None:
    """Full, or with errors, while the engine serves: what lies there already is recalled, what is new is not kept."""
    with queue(tmp_path, 2) as h:
        old, new = prompts(4, 2048)[:2], prompts(4, 2048)[2:]
        h.put_below(old)
        kept = len(h.tier.blocks)
        refused: list[int] = []

        def write(blocks: Sequence[Outgoing], done: WriteDone) -> None:
            refused.append(len(blocks))
            h.tier._executor.submit(lambda: None, lambda error: done([answer] * len(blocks)))

        h.tier.write = write  # type: ignore[method-assign]
        ids = [h.add(tokens) for tokens in (*new, *old)]
        h.run_slowly()
        assert all(h.right(h.requests[rid]) for rid in ids)
        assert [h.requests[rid].external for rid in ids] == [0, 0, 2048, 2048]
        assert sum(refused) > 0 and len(h.tier.blocks) == kept
        assert h.stat(f"{h.tier.name}_skipped_{answer.value}") == sum(refused)
        h.rest()
        h.assert_quiet()
