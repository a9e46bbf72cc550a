"""Made traces have the shape that their names promise, and are the same whenever they are made."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import ConfigError
from stepwell.simulate.generator import GENERATORS
from stepwell.simulate.generator import agentic_tables as tables
from stepwell.simulate.traces.load import load
from stepwell.simulate.traces.trace import Ints, Trace

SMALL = {
    "agentic": "agentic:conversations=20,open=4",
    "churn": "churn:requests=2000,documents=50",
    "cyclic": "cyclic:requests=500,documents=20",
    "scan": "scan:requests=2000,documents=20",
    "zipf": "zipf:requests=2000,documents=50",
}


def made(source: str, **wishes: int) -> Trace:
    loaded = load(source, **wishes)  # type: ignore[arg-type]
    assert not loaded.problems.renamed, "ids are chained by construction"
    return loaded.trace


def arrays(trace: Trace) -> list[bytes]:
    columns = (trace.times, trace.inputs, trace.outputs, trace.sessions, trace.starts, trace.ids)
    return [column.tobytes() for column in columns]


def documents(trace: Trace) -> Ints:
    """What each request is about, told by its last block, numbered as they come."""
    last = trace.ids[trace.starts[1:] - 1]
    return np.unique(last, return_inverse=True)[1]


def test_each_generator_is_tried_here() -> None:
    assert SMALL.keys() == GENERATORS.keys()


@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_seed_makes_the_same_trace_and_another_seed_another(name: str) -> None:
    one, again, other = made(SMALL[name]), made(SMALL[name]), made(f"{SMALL[name]},seed=1")
    assert arrays(one) == arrays(again)
    assert arrays(one) != arrays(other)
    assert one.name == SMALL[name]


@pytest.mark.parametrize("name", sorted(SMALL))
def test_prompts_are_as_long_as_their_blocks_say(name: str) -> None:
    for block_tokens in (16, 512):
        trace = made(SMALL[name], block_tokens=block_tokens)
        assert trace.block_tokens == block_tokens
        assert (np.diff(trace.starts) == trace.inputs // block_tokens).all()
        assert 0 < trace.ceiling().sum() < trace.input_tokens


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_default_sizes_replay_in_seconds(name: str) -> None:
    trace = made(name)
    assert 10_000 <= len(trace) <= 60_000
    assert 5_000 <= trace.distinct <= 400_000
    assert trace.times[-1] / len(trace) == pytest.approx(1, rel=0.05) or name == "agentic"


def test_cyclic_comes_back_after_all_others() -> None:
    trace = made("cyclic:requests=90,documents=30")
    asked = documents(trace)
    for i in range(30, 90):
        assert asked[i] == asked[i - 30]
        assert len(set(asked[i - 30 : i].tolist())) == 30
    assert trace.ceiling()[:30].sum() == 0
    assert (trace.ceiling()[30:] > 0).all()


def test_zipf_is_skewed_and_shares_the_system_prompt() -> None:
    trace = made("zipf:requests=20000,documents=100,skew=1,system=1024")
    assert all(trace.request(i)[:2].tolist() == [0, 1] for i in range(len(trace)))
    counts = np.sort(np.bincount(documents(trace)))[::-1] / len(trace)
    expected = 1 / np.arange(1, 101) / np.sum(1 / np.arange(1, 101))
    assert counts[:5] == pytest.approx(expected[:5], rel=0.15)
    flat = np.bincount(documents(made("zipf:requests=20000,documents=100,skew=0")))
    assert flat.max() / flat.min() < 2


def test_churn_forgets_what_was_popular() -> None:
    trace = made("churn:requests=4000,documents=50,every=20,skew=1")
    asked = documents(trace)
    early, late = set(asked[:1000].tolist()), set(asked[-1000:].tolist())
    assert not early & late, "50 documents live 1000 requests each"
    firsts = [int(np.flatnonzero(asked == one)[0]) for one in range(60, 200)]
    ages = [np.flatnonzero(asked == one) - first for one, first in zip(range(60, 200), firsts, strict=True)]
    young = sum(int(np.count_nonzero(age < 250)) for age in ages)
    old = sum(int(np.count_nonzero(age >= 750)) for age in ages)
    assert young > 3 * old, "a document is most popular when it is new"


def test_scan_puts_bursts_that_never_return_beside_a_set_that_does() -> None:
    trace = made("scan:requests=20000,documents=100,once=0.3,burst=40")
    asked = documents(trace)
    counts = np.bincount(asked)
    once = counts == 1
    assert np.count_nonzero(once) / len(trace) == pytest.approx(0.3, rel=0.15)
    assert np.count_nonzero(~once) == 100
    scanned = once[asked]
    bursts = np.count_nonzero(scanned[1:] & ~scanned[:-1])
    assert np.count_nonzero(scanned) / bursts == pytest.approx(40, rel=0.3)
    for share, distinct in ((0, 100), (1, 20000)):
        assert documents(made(f"scan:requests=20000,documents=100,once={share}")).max() + 1 == distinct


def test_agentic_is_like_the_recordings() -> None:
    """Within what four seeds of the full size vary: lengths by a tenth, the ceiling by some tenths of a point."""
    trace = made("agentic:seed=2")
    assert len(trace) == pytest.approx(22_892, rel=0.1)
    assert trace.inputs.mean() == pytest.approx(122_000, rel=0.1)
    assert np.quantile(trace.inputs, 0.9) == pytest.approx(222_500, rel=0.1)
    assert np.quantile(trace.outputs, [0.5, 0.95]) == pytest.approx([223, 1534], rel=0.1)
    assert trace.ceiling().sum() / trace.input_tokens == pytest.approx(0.961, abs=0.004)
    gaps = np.concatenate([np.diff(trace.times[trace.sessions == one]) for one in range(346)])
    assert np.quantile(gaps, [0.5, 0.9, 0.99]) == pytest.approx([18, 129, 1923], rel=0.15)


def test_agentic_turns_grow_and_are_sometimes_reset() -> None:
    trace = made("agentic:conversations=100")
    kept = grew = turns = 0
    for session in range(100):
        mine = [trace.request(i) for i in np.flatnonzero(trace.sessions == session)]
        for before, after in pairwise(mine):
            turns += 1
            same = np.array_equal(before, after[: len(before)])
            kept += same
            grew += same and len(after) > len(before)
    assert 0.96 < kept / turns < 0.99, "about two of a hundred turns are reset"
    assert grew / turns > 0.5


TALKS = "agentic:conversations=100"


def test_agentic_has_as_many_open_as_it_is_told() -> None:
    for wishes, source in (({"open_": 8}, TALKS), ({}, f"{TALKS},open=8"), ({"open_": 64}, f"{TALKS},open=8")):
        trace = made(source, **wishes)
        assert trace.name == f"{TALKS},open=8"
        spans = [np.ptp(trace.times[trace.sessions == one]) for one in range(100)]
        firsts = [trace.times[trace.sessions == one].min() for one in range(100)]
        assert sum(spans) / np.ptp(firsts) == pytest.approx(8, rel=0.05)


def test_tables_are_quantiles() -> None:
    for points, quantiles in (
        (tables.POINTS, tables.NEW_TOKENS),
        (tables.POINTS, tables.OUTPUT),
        (tables.POINTS, tables.KEPT_ON_RESET),
        (tables.POINTS, tables.AFTER_COMPACTION),
        (tables.GAP_POINTS, tables.GAP),
        *((tables.BAND_POINTS, band.first_context) for band in tables.BANDS),
        *((tables.BAND_POINTS, band.requests) for band in tables.BANDS),
    ):
        assert len(points) == len(quantiles)
        assert (points[0], points[-1]) == (0, 1)
        assert list(points) == sorted(points) and list(quantiles) == sorted(quantiles)


@pytest.mark.parametrize(
    ("source", "code", "says"),
    [
        ("zipf:sed=3", "SW-121", "did you mean seed?"),
        ("zipf:conversations=3", "SW-121", "There are: documents, gap, requests, seed, skew, system, tokens"),
        ("zipf:seed", "SW-122", "from 0 to"),
        ("zipf:seed=", "SW-122", "a whole number"),
        ("zipf:seed=1.5", "SW-122", "a whole number"),
        ("zipf:seed=-1", "SW-122", "from 0 to"),
        ("zipf:seed=1,seed=2", "SW-122", "twice"),
        ("zipf:skew=nan", "SW-122", "from 0 to 10"),
        ("zipf:skew=inf", "SW-122", "from 0 to 10"),
        ("cyclic:documents=0", "SW-122", "from 1 to"),
        ("cyclic:requests=" + "9" * 5000, "SW-122", "from 1 to"),
        ("cyclic:requests=2000000,tokens=1000000", "SW-122", "blocks"),
    ],
)
def test_parameters_that_cannot_be(source: str, code: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(source)
    assert caught.value.code == code
    assert says in str(caught.value)
    assert len(str(caught.value)) < 500


def test_the_page_lists_all_parameters() -> None:
    page = (Path(__file__).parents[2] / "docs/traces.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| (`seed=0`.*) \|$", page, re.MULTILINE))
    fields = {name: kind.__dataclass_fields__.values() for name, kind in GENERATORS.items()}
    assert rows == {name: " ".join(f"`{one.name}={one.default}`" for one in of) for name, of in fields.items()}


def test_parameters_may_have_spaces_and_ends() -> None:
    assert arrays(made("cyclic: documents = 20 ,requests=500,")) == arrays(made(SMALL["cyclic"]))


EDGES = {"requests": 300, "documents": 300, "conversations": 5, "tokens": 100_000, "open": 300, "system": 5000}


@given(st.sampled_from(sorted(GENERATORS)), st.data())
def test_any_allowed_parameters_make_a_trace(name: str, data: st.DataObject) -> None:
    chosen = {}
    for parameter in GENERATORS[name].__dataclass_fields__.values():
        low, high = parameter.metadata["low"], min(parameter.metadata["high"], EDGES.get(parameter.name, 2**63))
        numbers = st.integers(low, int(high)) if isinstance(parameter.default, int) else st.floats(low, high)
        if data.draw(st.booleans()):
            chosen[parameter.name] = data.draw(numbers)
        elif parameter.name in EDGES:
            chosen[parameter.name] = max(low, min(5, high))
    trace = made(f"{name}:" + ",".join(f"{one}={value!r}" for one, value in chosen.items()))
    assert (np.diff(trace.starts) == trace.inputs // 512).all()
    assert bool(np.all(np.diff(trace.times) >= 0)) and bool(np.isfinite(trace.times).all())
    assert (trace.outputs >= 0).all()
