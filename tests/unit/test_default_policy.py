"""The default policy behaves like the best of the others, without being told which that is."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from small_traces import seconds, trace_of

from stepwell.policies.catalog import POLICIES
from stepwell.simulate.replay import Replay, Replayed
from stepwell.simulate.traces.load import load
from stepwell.simulate.traces.trace import Floats, Trace


def replayed(trace: Trace, policy: str, capacity: int) -> Replayed:
    return Replay(trace, POLICIES[policy](), capacity, seconds).run()


def share(trace: Trace, policy: str, capacity: int) -> float:
    """Of all blocks that were asked for in the second half, of those that were found."""
    late = slice(len(trace) // 2, None)
    return float(replayed(trace, policy, capacity).hits[late].sum() / np.diff(trace.starts)[late].sum())


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_of_a_cycle_it_keeps_a_part(part: float) -> None:
    trace = load("cyclic:requests=600,documents=30,tokens=4096", block_tokens=256).trace
    capacity = int(part * trace.distinct)
    assert share(trace, "lru", capacity) == 0
    assert share(trace, "auto", capacity) > 0.85 * part


def test_of_a_scan_it_keeps_what_is_used_again() -> None:
    trace = load("scan:requests=3000,documents=20,tokens=4096,once=0.6", block_tokens=256).trace
    last = trace.ids[trace.starts[1:] - 1]
    again = np.bincount(last)[last] > 1  # requests for what is asked for more than once
    capacity = len(np.unique(np.concatenate([trace.request(i) for i in np.flatnonzero(again)])))
    late = again & (np.arange(len(trace)) > len(trace) // 2)
    blocks = np.diff(trace.starts)[late].sum()
    found = {name: replayed(trace, name, capacity) for name in ("auto", "lru")}
    kept = {name: one.hits[late].sum() / blocks for name, one in found.items()}
    assert kept["auto"] > 0.97
    assert kept["lru"] < 0.7
    assert found["auto"].entered < found["lru"].entered / 2, "and does not write what will not be read"


def test_it_lets_in_all_that_there_is_room_for() -> None:
    trace = load("zipf:requests=400,documents=60,tokens=1024", block_tokens=256).trace
    assert replayed(trace, "auto", trace.distinct).entered == trace.distinct


def test_it_does_the_same_again() -> None:
    trace = load("zipf:requests=1500,documents=200,tokens=2048", block_tokens=256).trace
    one, again = (replayed(trace, "auto", trace.distinct // 10) for _ in range(2))
    assert (one.hits == again.hits).all() and one.entered == again.entered


@pytest.mark.parametrize("apart_s", [0.0, 1e-3, 1.0, 3600.0])
def test_it_is_as_good_at_any_rate(apart_s: float) -> None:
    """Also for requests that all have the same time: of a trace without times, or of one that was recorded coarsely."""
    times = apart_s * np.arange(6000)
    assert gained(recent(times), 25) >= 0.99


@pytest.mark.parametrize("silence_s", [60.0, 86400.0])
def test_in_a_silence_nothing_grows_old(silence_s: float) -> None:
    """Bursts of 200 requests, and nothing between them."""
    at = np.arange(6000)
    assert gained(recent(at // 200 * silence_s + at % 200 * 0.005), 25) >= 0.99
    scans = load("scan:requests=3000,documents=100,tokens=512,once=0.7", block_tokens=512).trace
    steady, at = replayed(scans, "auto", 20).hits.sum(), np.arange(len(scans))
    bursts = replace(scans, times=at // 200 * silence_s + at % 200 * 0.005)
    assert replayed(bursts, "auto", 20).hits.sum() > 0.9 * steady


def recent(times: Floats) -> Trace:
    """What was asked for lately is asked for again, most likely what was last: LRU is hard to beat."""
    chance, ids = random.Random(3), [0]
    for new in range(1, len(times)):
        back = int(chance.expovariate(1 / 20)) + 1
        ids.append(ids[-min(len(ids), back)] if chance.random() < 0.6 else new)
    return replace(trace_of([[id] for id in ids]), times=times)


def gained(trace: Trace, capacity: int) -> float:
    """What the default finds, of what LRU does."""
    found = [replayed(trace, policy, capacity).hits.sum() for policy in ("auto", "lru")]
    return float(found[0] / found[1])
