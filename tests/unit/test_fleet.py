"""A simulated fleet accounts for every token and byte, decides as the well does, and loses only what fails."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.errors import ConfigError
from stepwell.policies.catalog import POLICIES
from stepwell.simulate.fleet.clock import EventClock
from stepwell.simulate.fleet.description import Fleet
from stepwell.simulate.fleet.description import load as described
from stepwell.simulate.fleet.fields import ROUTES, WRITES
from stepwell.simulate.fleet.results import FleetRow, RequestRow, simulate
from stepwell.simulate.fleet.run import Played, play
from stepwell.simulate.fleet.server import SharedServer
from stepwell.simulate.fleet.tier import SimulatedLevel
from stepwell.simulate.fleet.view import View
from stepwell.simulate.replay import Replay
from stepwell.simulate.store import Store
from stepwell.simulate.traces.forest import BlockRun
from stepwell.simulate.traces.load import load
from stepwell.simulate.traces.trace import Trace

EXAMPLE = Path(__file__).parents[2] / "examples/fleet.yaml"
TOKEN_BYTES = 1000
BLOCK = 512 * TOKEN_BYTES
FAST = {"read_bandwidth": "1PB/s", "write_bandwidth": "1PB/s"}


def tier(blocks: int, **more: Any) -> dict[str, Any]:
    return {"capacity": blocks * BLOCK, **FAST, **more}


def fleet(gpu: int | None = None, **parts: Any) -> Fleet:
    """`gpu`: blocks of its pages, none without."""
    engine = {"kv_capacity": (gpu or 1) * BLOCK, "prefix_caching": gpu is not None, "link": "1PB/s"}
    return Fleet.model_validate({"kv_token_bytes": TOKEN_BYTES, "engine": engine | parts.pop("engine", {}), **parts})


def made(source: str = "zipf:requests=400,documents=40,tokens=4096,system=1024") -> Trace:
    return load(source).trace


def trace(*requests: tuple[float, list[int]], block_tokens: int = 512) -> Trace:
    """Of full blocks: (seconds, ids)."""
    lengths = [len(ids) for _, ids in requests]
    n = len(requests)
    return Trace(
        name="made",
        block_tokens=block_tokens,
        times=np.array([time for time, _ in requests], np.float64),
        inputs=np.array(lengths) * block_tokens,
        outputs=np.zeros(n, np.int64),
        sessions=np.full(n, -1),
        starts=np.concatenate([[0], np.cumsum(lengths)]),
        ids=np.array([i for _, ids in requests for i in ids]),
    )


def hits(played: Played) -> list[int]:
    """Blocks that each request found."""
    return [prompt.found[-1][1] if prompt.found else 0 for prompt in played.prompts]


def written(played: Played, name: str) -> int:
    return sum(tier.written_bytes for tier in played.tiers[name]) // BLOCK


# --- the parts


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), max_size=20), st.floats(0.1, 10))
def test_one_slot_is_first_come_first_served(jobs: list[tuple[float, float]], rate: float) -> None:
    clock = EventClock()
    server = SharedServer(clock, rate)
    ended: list[float] = []
    for at, work in jobs:
        clock.at(at, lambda work=work: server.submit(work, lambda: ended.append(clock.now)))
    clock.run()
    expected, free = [], 0.0
    for at, work in sorted(jobs, key=lambda job: job[0]):
        free = max(free, at) + work / rate
        expected.append(free)
    assert ended == pytest.approx(expected)
    assert server.outstanding == 0


@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=12), st.integers(1, 12), st.floats(0.05, 1))
def test_slots_share_what_there_is_and_nobody_gets_more_than_most(work: list[float], slots: int, most: float) -> None:
    clock = EventClock()
    server = SharedServer(clock, 1.0, slots, most)
    ends: dict[int, float] = {}
    for i, one in enumerate(work):
        server.submit(one, lambda i=i: ends.__setitem__(i, clock.now))
    clock.run()
    assert len(ends) == len(work)
    assert all(ends[i] >= one / most - 1e-9 for i, one in enumerate(work))
    assert max(ends.values()) >= sum(work) - 1e-9
    if slots * most <= 1 or slots == 1:
        assert max(ends.values()) >= sum(work) / (most * min(slots, len(work))) - 1e-9
    if slots >= len(work) and most >= 1:
        assert max(ends.values()) == pytest.approx(sum(work)), "it is never idle while somebody waits"


def test_a_server_that_slows_down_or_fails_does_so_at_once() -> None:
    clock = EventClock()
    server = SharedServer(clock, 10.0)
    told: list[tuple[str, float]] = []
    for name in "abc":
        server.submit(
            10.0,
            lambda name=name: told.append((name, clock.now)),
            lost=lambda name=name: told.append(("lost", clock.now)),
        )
    clock.at(0.5, lambda: server.run_at(1.0))  # half of the first is left: 5 more seconds
    clock.at(7.5, server.fail)
    clock.run()
    assert told == [("a", 5.5), ("lost", 7.5), ("lost", 7.5)]


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=40),
    st.sampled_from(sorted(POLICIES)), st.integers(1, 12), st.data(),
)  # fmt: skip
def test_a_store_that_is_written_back_to_in_any_order_keeps_its_bounds_and_counts(
    words: list[list[int]], policy: str, capacity: int, data: st.DataObject
) -> None:
    names: dict[tuple[int, ...], int] = {}
    requests = [
        (float(i), [names.setdefault(tuple(word[: k + 1]), len(names)) for k in range(len(word))])
        for i, word in enumerate(words)
    ]
    of = trace(*requests)
    left: list[BlockRun] = []
    store = Store(of, POLICIES[policy](), capacity, lambda first, last: float(last - first), left.append)
    held: set[int] = set()
    for i in range(len(of)):
        first, last = int(of.starts[i]), int(of.starts[i + 1])
        store.refer(float(i), first, last)
        back = data.draw(st.integers(0, len(words[i]) - 1))
        store.path(first, first + back)
        came = store.offer([run for run in store.path(first, last) if run.start >= back], data.draw(st.integers(0, 8)))
        for run in left:
            held -= set(of.ids[run.base : run.base + run.size].tolist())
        left.clear()
        for run in came:
            held |= set(of.ids[run.base : run.base + run.size].tolist())
        assert store.held == len(held) <= capacity


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=30),
    st.integers(1, 9),
    st.booleans(),
)
def test_a_view_that_is_not_stale_is_what_is_held(words: list[list[int]], capacity: int, loses: bool) -> None:
    names: dict[tuple[int, ...], int] = {}
    of = trace(
        *[(0, [names.setdefault(tuple(word[: k + 1]), len(names)) for k in range(len(word))]) for word in words],
    )
    view = View(EventClock(), of, 2, 0.0)
    store = partial(Store, of, POLICIES["lru"](), capacity, lambda first, last: 1.0)
    level = SimulatedLevel("gpu", store, view.watch(1))
    for i in range(len(of)):
        first, last = int(of.starts[i]), int(of.starts[i + 1])
        held = np.zeros(last - first, bool)
        for begin, end in level.refer(0.0, first, last):
            held[begin:end] = True
        assert view.of(first, last).tolist() == [[False] * (last - first), held.tolist()]
        level.there(first, last)
    if loses:
        level.lose()
        assert not view.of(0, len(of.ids)).any() and not level.held


# --- the whole


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    names = draw(st.lists(st.sampled_from(["host", "disk", "shared"]), unique=True))
    gpu = draw(st.sampled_from([None, 3, 40, 400]))
    nothing_above = gpu is None
    tiers = {}
    for name in sorted(names, key=["host", "disk", "shared"].index):
        tiers[name] = {
            "capacity": draw(st.integers(1, 400)) * BLOCK,
            "read_bandwidth": draw(st.sampled_from(["1MB", "100MB", "1TB"])),
            "write_bandwidth": draw(st.sampled_from(["1MB", "1TB"])),
            "latency": draw(st.sampled_from([0, 0.2])),
            "parallel": draw(st.integers(1, 3)),
            "policy": draw(st.sampled_from(sorted(POLICIES))),
            "write": draw(st.sampled_from(["through", "second_touch"] if nothing_above else WRITES)),
        }
        nothing_above = False
    times = st.floats(0, 150)
    failures: dict[str, Any] = {
        "engine": {"what": "engine_restart", "engine": 1, "at": draw(times), "down": draw(times)},
        "host": {"what": "host_restart", "host": 0, "at": draw(times), "down": draw(times)},
    }
    for name in [name for name in ("disk", "shared") if name in tiers]:
        at = draw(times)
        failures[name] = {"what": draw(st.sampled_from(["slow", "gone"])), "tier": name, "at": at, "until": at + 30}
    return fleet(
        gpu, hosts=2, engines_per_host=2, tiers=tiers, failures=failures, seed=draw(st.integers(0, 3)),
        decide=draw(st.sampled_from(["auto", "always", "never"])), routing={"by": draw(st.sampled_from(ROUTES))},
        engine={"prefills": draw(st.integers(1, 3)), "link": draw(st.sampled_from(["10MB/s", "1PB/s"]))},
        speed=draw(st.sampled_from([1, 20])),
    )  # fmt: skip


@settings(max_examples=25)
@given(fleets(), st.sampled_from(["zipf:requests=150,documents=30,tokens=2048", "agentic:conversations=3,open=3"]))
def test_every_token_is_found_once_or_computed_and_every_second_has_a_name(of: Fleet, source: str) -> None:
    taken = made(source)
    taken = taken if len(taken) < 400 else trace_of(taken, 400)
    row, requests = simulate(of, taken)
    assert [request.number for request in requests] == list(range(len(taken)))
    for request in requests:
        assert min(request.tokens.values(), default=1) > 0 <= request.recomputed
        assert sum(request.tokens.values()) + request.recomputed == request.input_tokens
        assert request.ttft_s == pytest.approx(request.recall_s + request.queue_s + request.compute_s, abs=1e-5)
        assert min(request.recall_s, request.compute_s) >= 0 and request.queue_s >= -1e-5
    assert row.hit_tokens_ratio <= row.ceiling_ratio + 1e-6
    for level in row.tiers:
        assert 0 <= level.held_bytes <= level.capacity_bytes
        assert level.held_bytes <= level.written_bytes or level.tier == "gpu"
    assert sum(level.hit_tokens for level in row.tiers) + row.recomputed_tokens == row.input_tokens


def trace_of(whole: Trace, n: int) -> Trace:
    """Its first requests."""
    last = int(whole.starts[n])
    return Trace(
        whole.name, whole.block_tokens, whole.times[:n], whole.inputs[:n], whole.outputs[:n], whole.sessions[:n],
        whole.starts[: n + 1], whole.ids[:last],
    )  # fmt: skip


@pytest.mark.parametrize("where", ["host", "disk", "shared"])
def test_one_fast_tier_without_bounds_has_all_that_any_cache_could_have(where: str) -> None:
    of = made()
    played = play(fleet(tiers={where: tier(10**6, policy="lru")}, speed=1e-3), of)
    found = [min(blocks * of.block_tokens, int(tokens)) for blocks, tokens in zip(hits(played), of.inputs, strict=True)]
    assert found == of.ceiling().tolist()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_one_engine_with_tiers_that_cost_nothing_hits_as_the_replay_of_one_tier(policy: str) -> None:
    of, capacity = made(), 60
    one = fleet(tiers={"host": tier(capacity, policy=policy)}, speed=1e-3, decide="always")
    slowed = Trace(of.name, of.block_tokens, of.times * 1e3, of.inputs, of.outputs, of.sessions, of.starts, of.ids)
    prefill = one.prefill_cost
    replayed = Replay(
        slowed, POLICIES[policy](), capacity, lambda first, last: prefill.seconds(last - first, first)
    ).run()
    played = play(one, of)
    assert hits(played) == replayed.hits.tolist()
    assert written(played, "host") == replayed.entered
    assert 0 < sum(hits(played)) < of.ceiling().sum() / of.block_tokens


def test_the_gpu_is_lru_as_vllm_has_it() -> None:
    of = made()
    replayed = Replay(of, POLICIES["lru"](), 60, lambda first, last: 1.0).run()
    assert hits(play(fleet(60, speed=1e-3), of)) == replayed.hits.tolist()


# --- deciding


def test_a_tier_slower_than_computing_is_refused_by_the_default_and_makes_always_lose() -> None:
    """A token takes 65 us to compute and, with 131,072 bytes, 33 times as long to read."""
    of = made("zipf:requests=200,documents=20,tokens=8192,gap=4")
    mean = {}
    for bandwidth in ("60MB/s", "60GB/s"):
        for mode in ("auto", "always", "never"):
            disk = {"capacity": "10TB", "read_bandwidth": bandwidth, "write_bandwidth": "1TB/s"}
            one = Fleet.model_validate({"engine": {"prefix_caching": False}, "tiers": {"disk": disk}, "decide": mode})
            mean[bandwidth, mode] = simulate(one, of)[0].ttft_s.mean
    assert mean["60MB/s", "always"] > 1.5 * mean["60MB/s", "never"]
    assert mean["60MB/s", "auto"] <= mean["60MB/s", "never"]
    assert mean["60GB/s", "always"] < 0.7 * mean["60GB/s", "never"]
    assert mean["60GB/s", "auto"] <= 1.01 * mean["60GB/s", "always"]


def test_two_recalls_share_a_drive_and_one_that_is_late_takes_what_has_landed() -> None:
    ids = list(range(100))
    other = list(range(100, 200))
    of = trace((0.0, ids), (0.0, other), (100.0, ids), (100.0, other))
    slow = {"token_s": 1e-4}  # 5.12 s for all, 0.0512 s a block
    disk = tier(1000, read_bandwidth=BLOCK * 100)  # 1 s for all of one prompt
    played = play(fleet(tiers={"disk": disk}, prefill=slow, engine={"prefills": 2}), of)
    assert [round(prompt.recall_s, 3) for prompt in played.prompts] == [0, 0, 1.0, 2.0]
    assert hits(played)[2:] == [100, 100]
    # From the moment at which both wait, the drive is 10 times slower: at their limit, what computing takes...
    failing = {"worn": {"what": "slow", "tier": "disk", "at": 100.5, "until": 999, "factor": 10}}
    played = play(fleet(tiers={"disk": disk}, prefill=slow, engine={"prefills": 2}, failures=failing), of)
    late = played.prompts[2]
    assert late.recall_s == pytest.approx(5.12, abs=1e-3)
    # ... 50 blocks of it came in the first half second, 10 a second since. The other has stood in line for as long.
    assert hits(played)[2:] == [50 + 46, 0]


# --- what is written


@pytest.mark.parametrize(("write", "host", "disk"), [("through", 4, 4), ("back", 2, 0), ("second_touch", 1, 1)])
def test_write_policies_say_when_a_block_is_written_down(write: str, host: int, disk: int) -> None:
    """Four blocks, one of them used twice, in a GPU of two."""
    of = trace((0, [0]), (10, [1]), (20, [1]), (30, [2]), (40, [3]))
    tiers = {name: tier(100, write=write, policy="lru") for name in ("host", "disk")}
    played = play(fleet(2, tiers=tiers), of)
    assert (written(played, "host"), written(played, "disk")) == (host, disk)


def test_back_goes_down_level_by_level_and_is_found_there() -> None:
    of = trace(*[(10.0 * i, [i]) for i in range(4)], *[(100 + 10.0 * i, [i]) for i in range(4)])
    tiers = {name: tier(1, write="back", policy="lru") for name in ("host", "disk", "shared")}
    played = play(fleet(1, tiers=tiers), of)
    assert [prompt.found for prompt in played.prompts[4:]] == [[("shared", 1)]] * 4
    assert written(played, "host") == 7, "all that left the GPU"


def test_what_finds_no_room_in_the_queue_of_writes_is_dropped_and_counted() -> None:
    of = trace((0, list(range(10))), (1.5, list(range(10))), (2.7, list(range(10))))
    slow = tier(100, write_bandwidth=BLOCK, write_queue=4 * BLOCK)
    row = simulate(fleet(tiers={"disk": slow}, decide="always"), of)[0]
    assert [row.tiers[0].written_bytes, row.tiers[0].dropped_bytes] == [6 * BLOCK, (6 + 5 + 4) * BLOCK]


def test_years_to_wear_out_follow_from_what_is_written() -> None:
    of = made()
    tiers = {"disk": tier(1000, endurance="1TB", write_amplification=1.5)}
    row = simulate(fleet(tiers=tiers, hosts=2), of)[0]
    (disk,) = row.tiers
    a_day = disk.written_bytes * 1.5 / 2 / row.seconds * 86_400
    assert disk.written_a_day_bytes == pytest.approx(a_day, rel=1e-3)
    assert disk.years_to_wear_out == pytest.approx(1e12 / a_day / 365.25, rel=1e-3)
    of_drives = fleet(tiers={"disk": tier(1000, drive_writes_per_day=2)}).tiers["disk"]
    assert of_drives.endurance_bytes == 2 * 1000 * BLOCK * 365 * 5


# --- routing


def routed(of: Trace, **routing: Any) -> list[int]:
    return [p.engine for p in play(fleet(400, hosts=2, engines_per_host=4, routing=routing, seed=1), of).prompts]


def test_routing() -> None:
    of = made("zipf:requests=400,documents=40,tokens=4096,system=1024,gap=30")
    assert routed(of, by="round_robin") == [i % 8 for i in range(400)]
    assert min(Counter(routed(of, by="random")).values()) > 25
    by_prefix: dict[int, set[int]] = {}
    for i, engine in enumerate(routed(of, by="prefix_affinity", prefix_blocks=4)):
        by_prefix.setdefault(int(of.request(i)[3]), set()).add(engine)
    assert len(by_prefix) > 20 and all(len(engines) == 1 for engines in by_prefix.values())
    assert len(set.union(*by_prefix.values())) == 8


def test_affinity_moves_only_the_prefixes_of_an_engine_that_failed() -> None:
    of = made("zipf:requests=400,documents=40,tokens=4096,system=1024,gap=30")
    routing = {"by": "prefix_affinity", "prefix_blocks": 4}
    before = routed(of, **routing)
    gone = {"e": {"what": "engine_restart", "engine": 2, "at": 0, "down": "90d"}}
    after = [
        p.engine for p in play(fleet(400, hosts=2, engines_per_host=4, routing=routing, failures=gone), of).prompts
    ]
    assert all(a == b for a, b in zip(after, before, strict=True) if b != 2)
    assert 2 in before and len({a for a, b in zip(after, before, strict=True) if b == 2}) > 1


def test_kv_aware_goes_where_most_is_held_if_it_knows_and_is_not_too_busy() -> None:
    a, b = list(range(10)), list(range(10, 20))
    of = trace((0, a), (100, b), (200, a), (300, b))
    two = {"hosts": 2, "engine": {"link": "1PB/s"}}
    engines = [p.engine for p in play(fleet(100, **two, routing={"by": "kv_aware"}), of).prompts]
    assert engines[0] == engines[2] and engines[1] == engines[3]
    blind = play(fleet(100, **two, routing={"by": "kv_aware", "stale": "1d"}), of)
    assert [p.engine for p in blind.prompts] == [0] * 4, "nothing is known of anyone, and nobody is busy"
    at_once = trace((0, a), *[(100, a)] * 4)
    spread = play(fleet(100, **two, routing={"by": "kv_aware"}, prefill={"token_s": 1.0}), at_once)
    alone = play(fleet(100, **two, routing={"by": "kv_aware", "load_weight": 0}), at_once)
    assert {p.engine for p in spread.prompts} == {0, 1} and {p.engine for p in alone.prompts} == {0}


def test_kv_aware_sees_the_tiers_of_a_host_and_what_was_lost() -> None:
    a = list(range(10))
    of = trace((0, a), (100, a), (300, a))
    parts = {"hosts": 2, "tiers": {"host": tier(100)}, "routing": {"by": "kv_aware"}}
    assert [p.engine for p in play(fleet(**parts), of).prompts] == [0, 0, 0]
    away = {"h": {"what": "host_restart", "host": 0, "at": 50, "down": 100}}
    played = play(fleet(**parts, failures=away), of)
    assert [p.engine for p in played.prompts] == [0, 1, 1] and hits(played) == [0, 0, 10]


# --- failures


def test_an_engine_loses_its_gpu_and_a_host_its_memory_and_neither_the_disk() -> None:
    a = list(range(10))
    of = trace((0, a), (100, a))
    tiers = {"host": tier(100), "disk": tier(100)}

    def found(**failure: Any) -> list[tuple[str, int]]:
        failures = {"f": {"at": 50, **failure}} if failure else {}
        return play(fleet(100, tiers=tiers, failures=failures), of).prompts[1].found

    assert found() == [("gpu", 10)]
    assert found(what="engine_restart", engine=0) == [("host", 10)]
    assert found(what="host_restart", host=0) == [("disk", 10)]
    bare = {
        "g": {"what": "gone", "tier": "disk", "at": 60, "until": 150},
        "f": {"what": "host_restart", "host": 0, "at": 50},
    }
    later = trace((0, a), (100, a), (200, a))
    played = play(fleet(tiers={"disk": tier(100)}, failures=bare), later)
    assert hits(played) == [0, 0, 10], "a disk that was away has what it had"
    assert written(played, "disk") == 10


def test_what_an_engine_had_taken_on_is_sent_anew_and_keeps_its_time_of_arrival() -> None:
    of = trace((0, [0, 1]), (1, [2, 3]))
    failing = {"f": {"what": "engine_restart", "engine": 0, "at": 5, "down": 10}}
    one = fleet(100, prefill={"token_s": 10 / 1024}, failures=failing)
    row, requests = simulate(one, of)
    assert [round(request.ttft_s, 3) for request in requests] == [25, 34], "back at 15, 10 s each"
    assert row.lost_requests == 2 and row.gpu_s == 30


def test_a_recall_from_a_disk_that_goes_away_is_computed_instead() -> None:
    a = list(range(100))
    of = trace((0, a), (100, a))
    disk = tier(1000, read_bandwidth=BLOCK * 100)
    gone = {"g": {"what": "gone", "tier": "disk", "at": 100.4, "until": 200}}
    played = play(fleet(tiers={"disk": disk}, prefill={"token_s": 1e-4}, failures=gone), of)
    assert hits(played) == [0, 0]
    assert played.prompts[1].done - 100 == pytest.approx(0.4 + 5.12)


def test_a_failure_that_ends_does_not_end_another_of_the_same_tier() -> None:
    a = list(range(10))
    of = trace((0, a), *[(at, a) for at in (55, 80, 120, 160)])

    def slow(**factors: tuple[float, float, float]) -> list[float]:
        failures = {
            name: {"what": "slow", "tier": "disk", "at": at, "until": until, "factor": factor}
            for name, (at, until, factor) in factors.items()
        }
        disk = tier(100, read_bandwidth=BLOCK * 1000)
        played = play(fleet(tiers={"disk": disk}, decide="always", failures=failures), of)
        return [round(prompt.recall_s, 6) for prompt in played.prompts[1:]]

    assert slow(long=(50, 150, 20)) == [0.2, 0.2, 0.2, 0.01]
    assert slow(long=(50, 150, 20), short=(60, 100, 1.5)) == [0.2, 0.2, 0.2, 0.01]
    assert slow(long=(50, 150, 20), short=(60, 100, 40)) == [0.2, 0.4, 0.2, 0.01], "the largest holds"
    assert slow(one=(50, 100, 20), other=(60, 150, 20)) == [0.2, 0.2, 0.2, 0.01]

    def gone(**times: tuple[float, float]) -> list[int]:
        failures = {
            name: {"what": "gone", "tier": "disk", "at": at, "until": until} for name, (at, until) in times.items()
        }
        return hits(play(fleet(tiers={"disk": tier(100)}, failures=failures), of))[1:]

    assert gone(long=(50, 150), short=(60, 100)) == gone(one=(50, 100), other=(60, 150)) == [0, 0, 0, 10]
    assert gone(one=(50, 60), other=(60, 70)) == [0, 10, 10, 10]


def test_an_engine_is_back_when_it_is_from_all_its_restarts() -> None:
    of = trace((0, [0]), (40, [0]), (90, [0]))
    host = {"what": "host_restart", "host": 0, "at": 20, "down": 10}
    engine = {"what": "engine_restart", "engine": 0, "at": 10, "down": 50}
    second = {"what": "engine_restart", "engine": 0, "at": 30, "down": 40}
    for failures, start in [({"e": engine, "h": host}, 60), ({"h": host, "e": engine, "s": second}, 70)]:
        played = play(fleet(100, failures=failures), of)
        assert [round(prompt.started, 6) for prompt in played.prompts] == [0, start, 90]
        assert hits(played) == [0, 0, 1]


# --- descriptions and the command


@pytest.mark.parametrize("by", ROUTES)
def test_the_same_seed_is_the_same_fleet(by: str) -> None:
    def rows(seed: int) -> tuple[FleetRow, list[RequestRow]]:
        tiers = {"host": tier(50, policy="lru"), "disk": tier(200, policy="sieve")}
        of = made("zipf:requests=80,documents=20,tokens=2048")
        return simulate(fleet(20, hosts=2, engines_per_host=2, tiers=tiers, routing={"by": by}, seed=seed), of)

    assert rows(1) == rows(1)
    assert (rows(1)[1] != rows(2)[1]) == (by == "random")


@pytest.mark.parametrize(
    ("setting", "code", "told"),
    [
        ("tiers.disk.read_bandwidth=0", "SW-102", "not a bandwidth"),
        ("tiers.disk.read_bandwidth=-7GB", "SW-102", "not a bandwidth"),
        ("tiers.disk.write_bandwidth=nan", "SW-102", "not a bandwidth"),
        ("tiers.disk.capacity=0", "SW-102", "tiers.disk.capacity"),
        ("tiers.dsk.capacity=1TB", "SW-102", "did you mean disk?"),
        ("tiers.disk.policy=lur", "SW-102", "did you mean lru?"),
        ("tiers.disk.write=trough", "SW-102", "did you mean through?"),
        ("tiers.disk.size=1TB", "SW-101", "tiers.NAME.capacity"),
        ("routing.by=kv-aware", "SW-102", "did you mean kv_aware?"),
        ("cost=llama-3.1-8b@h10", "SW-102", "did you mean llama-3.1-8b@h100?"),
        ("decide=allways", "SW-102", "did you mean always?"),
        ("speed=nan", "SW-102", "speed"),
        ("speed=1e-300", "SW-102", "greater than or equal to"),
        ("speed=1e300", "SW-102", "less than or equal to"),
        ("prefill.step_s=inf", "SW-102", "prefill.step_s"),
        ("prefill.token_s=nan", "SW-102", "prefill.token_s"),
        ("prefill.token_s=1e300", "SW-102", "less than or equal to 1000"),
        ("prefill.pair_s=1e300", "SW-102", "less than or equal to 1"),
        ("tiers.disk.warranty_years=1e300", "SW-102", "tiers.disk.warranty_years"),
        ("tiers.disk.drive_writes_per_day=1e300", "SW-102", "tiers.disk.drive_writes_per_day"),
        ("routing.load_weight=inf", "SW-102", "routing.load_weight"),
        ("engine.prefills=0", "SW-102", "engine.prefills"),
        ("nonsense", "SW-102", "KEY=VALUE"),
        ("tiers.disk.endurance=1PB", "SW-126", "two endurances"),
        ("failures.upgrade.engine=32", "SW-126", "numbered from 0 to 31"),
        ("failures.worn_drive.until=30m", "SW-126", "failures.worn_drive.until"),
        ("failures.worn_drive.tier=hst", "SW-102", "Known are disk, shared"),
        ("failures.worn_drive.what=host_restart", "", ""),
        ("failures.upgrade.what=gone", "SW-126", "names no tier"),
        ("hosts=4000", "SW-126", "32,000 engines"),
        ("prefill.token_s=0", "SW-126", "takes no time"),
        ("prefill.token_s=1e-6", "", ""),
        ("prefill.step_tokens=8", "SW-126", "takes no time"),
    ],
)
def test_a_description_that_cannot_be_is_refused_with_its_place(setting: str, code: str, told: str) -> None:
    if not code:
        described(EXAMPLE, [setting])
        return
    with pytest.raises(ConfigError) as raised:
        described(EXAMPLE, [setting])
    assert raised.value.code == code and told in str(raised.value)


def test_back_with_nothing_above_and_tiers_below_a_block_are_refused() -> None:
    with pytest.raises(ConfigError, match="nothing would ever be written"):
        described(EXAMPLE, ["engine.prefix_caching=false", "tiers.host.write=back"])
    with pytest.raises(ConfigError, match=r"tiers.disk.capacity is 1MiB.*SW-126"):
        play(described(EXAMPLE, ["tiers.disk.capacity=1MiB"]).settings, made())


@pytest.mark.parametrize(
    ("text", "setting", "what", "fix"),
    [
        ("tiers:\n  shared:\n    capacity: 1TB\n    read_bandwidth: 1GB/s\n", "",
         "fleet.yaml:3: tiers.shared lacks write_bandwidth", "set tiers.shared.write_bandwidth"),
        ("hosts: 1\ntiers:\n  disk: {}\n", "",
         "fleet.yaml:3: tiers.disk lacks capacity, read_bandwidth, write_bandwidth",
         "set tiers.disk.capacity, tiers.disk.read_bandwidth, tiers.disk.write_bandwidth"),
        ("hosts: 1\n", "failures.f.what=gone", "--set failures.f.what: failures.f lacks at", "set failures.f.at"),
    ],
)  # fmt: skip
def test_what_must_be_said_and_is_not_is_told_with_its_place(
    tmp_path: Path, text: str, setting: str, what: str, fix: str
) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        described(file, [setting] if setting else [])
    assert raised.value.code == "SW-102" and raised.value.fix == fix
    assert raised.value.what.replace(f"{tmp_path}/", "") == what


def test_the_example_runs_on_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from stepwell.cli.commands import app

    of_requests = tmp_path / "requests.jsonl"
    source = "zipf:requests=300,documents=30"
    arguments = ["simulate-fleet", str(EXAMPLE), source, "--set", "hosts=1", "--set", "routing.stale=5s"]
    done = CliRunner().invoke(app, [*arguments, "--json", "--requests", str(of_requests)])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["rows"]
    assert row["engines"] == 8 and [tier["tier"] for tier in row["tiers"]] == ["gpu", "host", "disk", "shared"]
    lines = [json.loads(line) for line in of_requests.read_text().splitlines()]
    assert len(lines) == 300 and sum(line["recomputed"] for line in lines) == row["recomputed_tokens"]
    assert row["gpu_saved_s"] == pytest.approx(row["gpu_without_tiers_s"] - row["gpu_s"], abs=2e-3) and row["gpu_s"] > 0
    text = CliRunner().invoke(app, arguments).stdout
    assert source in text and "first token after" in text and not done.stderr


def test_a_word_that_was_replaced_is_named_with_the_new_one() -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from stepwell.cli.commands import app

    source = "zipf:requests=30,documents=3"
    done = CliRunner().invoke(app, ["simulate-fleet", str(EXAMPLE), source, "--set", "decide=default"])
    assert done.exit_code == 0 and done.stderr.startswith("stepwell: --set decide: decide: `default` is `auto` now")
