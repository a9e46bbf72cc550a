"""Traces are what their files say: ids that name prefixes, requests in order, bad lines told and left out."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from itertools import chain as joined
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepwell.errors import ConfigError
from stepwell.simulate.formats import lengths, lines
from stepwell.simulate.formats.lines import writer, zstd
from stepwell.simulate.formats.own import save
from stepwell.simulate.traces import chains
from stepwell.simulate.traces.assemble import Columns, assemble
from stepwell.simulate.traces.chains import Blocks, chain, chained, dense, starts_of
from stepwell.simulate.traces.contexts import grown
from stepwell.simulate.traces.load import load
from stepwell.simulate.traces.problems import Problems
from stepwell.simulate.traces.runs import Runs, runs_of
from stepwell.simulate.traces.trace import Trace

# Few ids and short prompts, so that requests meet in their prefixes, and sometimes are not chained.
PROMPTS = st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=8)
RUNS = st.lists(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 5)), max_size=4), min_size=1, max_size=6)
FIELDS = ("times", "inputs", "outputs", "sessions", "starts", "ids")


def blocks_of(prompts: Sequence[Sequence[int]]) -> Blocks:
    counts = np.array([len(prompt) for prompt in prompts], np.int64)
    return Blocks(starts_of(counts), np.array([one for prompt in prompts for one in prompt], np.int64))


def prompts_of(blocks: Blocks) -> list[list[int]]:
    return [blocks.ids[a:b].tolist() for a, b in zip(blocks.starts, blocks.starts[1:], strict=False)]


def requests_of(trace: Trace) -> list[list[int]]:
    return [trace.request(i).tolist() for i in range(len(trace))]


def named_by_prefix(prompts: Sequence[Sequence[Any]]) -> list[list[int]]:
    """The model: a block is its whole prefix, numbered when it is first seen."""
    number: dict[tuple[Any, ...], int] = {}
    return [[number.setdefault(tuple(prompt[: i + 1]), len(number)) for i in range(len(prompt))] for prompt in prompts]


def is_chained(prompts: Sequence[Sequence[int]]) -> bool:
    before: dict[int, int] = {}
    return all(
        before.setdefault(one, prompt[i - 1] if i else -1) == (prompt[i - 1] if i else -1)
        for prompt in prompts
        for i, one in enumerate(prompt)
    )


def trace_of(prompts: Sequence[Sequence[int]], times: Sequence[float] | None = None, block: int = 4) -> Trace:
    n = len(prompts)
    inputs = np.array([len(prompt) * block + 1 for prompt in prompts], np.int64)
    sessions = np.array([i % 3 - 1 for i in range(n)], np.int64)
    columns = Columns(np.array(times if times is not None else range(n), float), inputs, inputs % 7, sessions)
    return assemble("made", block, columns, blocks_of(prompts), Problems("made"))


def same(one: Trace, other: Trace) -> bool:
    return one.block_tokens == other.block_tokens and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in FIELDS
    )


def put(path: Path, *lines: object) -> str:
    """A file with these lines, JSON unless they are text already."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


# --- ids -------------------------------------------------------------------------------------


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 9)))
def test_dense_ids_are_numbered_as_they_appear(ids: list[int]) -> None:
    number: dict[int, int] = {}
    assert dense(np.array(ids, np.int64)).tolist() == [number.setdefault(one, len(number)) for one in ids]


@given(PROMPTS)
@example([[1, 1]])
@example([[0, 1], [1]])
@example([[], [0], []])
def test_ids_that_stand_behind_different_prefixes_are_seen_and_renamed(prompts: list[list[int]]) -> None:
    blocks = blocks_of(prompts)
    assert chained(Blocks(blocks.starts, dense(blocks.ids))) == is_chained(prompts)
    assert prompts_of(Blocks(blocks.starts, chain(blocks))) == named_by_prefix(prompts)


@given(PROMPTS, st.data())
def test_a_trace_is_sorted_and_chained_whatever_it_is_made_of(prompts: list[list[int]], data: st.DataObject) -> None:
    times = data.draw(st.lists(st.integers(0, 5), min_size=len(prompts), max_size=len(prompts)))
    trace = trace_of(prompts, [time + 100.0 for time in times])
    order = sorted(range(len(prompts)), key=times.__getitem__)  # stable, as is the trace's
    assert requests_of(trace) == named_by_prefix([prompts[i] for i in order])
    assert trace.times.tolist() == [times[i] - min(times) for i in order]
    assert trace.inputs.tolist() == [len(prompts[i]) * 4 + 1 for i in order]
    assert trace.distinct == len({tuple(p[: i + 1]) for p in prompts for i in range(len(p))})


@given(PROMPTS)
def test_the_ceiling_is_what_a_cache_without_bounds_has(prompts: list[list[int]]) -> None:
    trace = trace_of(prompts)
    seen: set[tuple[int, ...]] = set()
    hits = []
    for prompt in prompts:
        prefixes = [tuple(prompt[: i + 1]) for i in range(len(prompt))]
        hits.append(4 * sum(prefix in seen for prefix in prefixes))
        seen.update(prefixes)
    assert trace.ceiling().tolist() == hits


def test_a_partly_filled_block_hits_no_more_than_the_prompt() -> None:
    columns = Columns(np.arange(2.0), np.array([5, 5]), np.zeros(2, np.int64), np.full(2, -1))
    trace = assemble("partly", 4, columns, blocks_of([[0, 1], [0, 1]]), Problems("partly"))
    assert trace.ceiling().tolist() == [0, 5]


@given(RUNS)
def test_runs_are_the_ids_that_they_abbreviate(requests: list[list[tuple[int, int]]]) -> None:
    runs, prompts = runs_and_prompts(requests)
    assert prompts_of(runs.blocks()) == prompts
    assert runs.chained() == is_chained(prompts)
    again = [
        [one for first, count in runs_of(np.array(prompt)) for one in range(first, first + count)] for prompt in prompts
    ]
    assert again == prompts
    assert all(len(runs_of(np.array(prompt))) <= len(rle) for prompt, rle in zip(prompts, requests, strict=True))


@given(RUNS, st.integers(2, 4), st.integers(0, 3))
@example([[(0, 1), (5, 1)], [(0, 1), (7, 1)]], 2, 0)
def test_larger_blocks_are_named_by_all_that_is_in_them(
    requests: list[list[tuple[int, int]]], step: int, short: int
) -> None:
    """Whole groups of small blocks only, and of those only full ones: `short` are not at the end."""
    runs, prompts = runs_and_prompts(requests)
    full = np.maximum(runs.lengths - short, 0)
    blocks, renamed = runs.regrouped(step, full)
    groups = [
        [tuple(prompt[i : i + step]) for i in range(0, usable - step + 1, step)]
        for prompt, usable in zip(prompts, full.tolist(), strict=True)
    ]
    assert named_by_prefix(prompts_of(blocks)) == named_by_prefix(groups)
    assert (renamed > 0) <= (not is_chained(prompts))


def runs_and_prompts(requests: list[list[tuple[int, int]]]) -> tuple[Runs, list[list[int]]]:
    flat = np.array([run for request in requests for run in request], np.int64).reshape(-1, 2)
    runs = Runs(starts_of(np.array([len(request) for request in requests])), flat[:, 0], flat[:, 1])
    return runs, [[one for first, count in request for one in range(first, first + count)] for request in requests]


ROWS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(-1, 2), st.integers(-1, 40)).map(lambda r: (r[0], r[1], min(r[2], r[0]))),
    min_size=1,
    max_size=12,
)


@given(ROWS)
@example([(4, 0, -1), (8, 1, -1), (12, 0, 12)])
def test_prompts_of_a_session_share_what_the_lengths_say(rows: list[tuple[int, int, int]]) -> None:
    """The model writes prompts as tokens; blocks that it then finds equal, and no others, have equal ids."""
    prompts: list[list[int]] = []
    former: dict[int, list[int]] = {}
    common: list[int] = []
    fresh = iter(range(10**6))
    for length, session, shared in rows:
        if session in former:
            tokens = former[session][: length if shared < 0 else shared]
        else:
            # Only whole blocks are known to be alike behind the common prefix of several.
            common += [next(fresh) for _ in range(max(0, shared // 4 * 4 - len(common)))]
            tokens = common[: max(0, shared) // 4 * 4]
        prompts.append(tokens + [next(fresh) for _ in range(length - len(tokens))])
        if session >= 0:
            former[session] = prompts[-1]
    lengths, sessions, shares = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    groups = [[tuple(prompt[i : i + 4]) for i in range(0, len(prompt) - 3, 4)] for prompt in prompts]
    assert named_by_prefix(prompts_of(grown(lengths, sessions, shares, 4))) == named_by_prefix(groups)


# --- formats ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all examples of a property."""
    return tmp_path_factory.mktemp("traces")


@given(PROMPTS, st.sampled_from(["own.jsonl", "own.jsonl.zst"]))
def test_our_own_format_gives_back_what_was_written(folder: Path, prompts: list[list[int]], name: str) -> None:
    trace = trace_of(prompts, np.cumsum(np.full(len(prompts), 0.1)).tolist())
    save(trace, folder / name)
    loaded = load(str(folder / name))
    assert same(loaded.trace, trace)
    assert loaded.trace.name == "made"
    assert not loaded.problems.malformed


def test_our_own_format_in_larger_blocks(folder: Path) -> None:
    save(trace_of([[0, 1, 2, 3, 4], [0, 1, 5, 6], [0, 1]]), folder / "own.jsonl")
    trace = load(str(folder / "own.jsonl"), block_tokens=8).trace
    assert requests_of(trace) == [[0, 1], [0, 2], [0]]
    with pytest.raises(ConfigError, match="does not divide 6"):
        load(str(folder / "own.jsonl"), block_tokens=6)


def test_mooncake(folder: Path) -> None:
    source = put(
        folder / "chat.jsonl",
        {"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [2**80, 7], "session_id": "a"},
        {"timestamp": 4000, "input_length": 1100, "output_length": 6, "hash_ids": [2**80, 8, 9]},
        {"timestamp": 2500.5, "input_length": 10, "output_length": 0, "hash_ids": [], "session_id": "b"},
    )
    loaded = load(source)
    trace = loaded.trace
    assert (trace.name, trace.block_tokens, trace.distinct) == ("chat", 512, 4)
    assert trace.times.tolist() == pytest.approx([0, 1.5005, 3])
    assert requests_of(trace) == [[0, 1], [], [0, 2, 3]]
    assert trace.sessions.tolist() == [0, 1, -1]
    assert trace.inputs.tolist() == [700, 10, 1100]
    assert trace.ceiling().tolist() == [0, 0, 512]
    assert loaded.problems.unsorted == 1


def test_ids_of_blocks_alone_are_renamed_and_that_is_told(folder: Path) -> None:
    rows = [{"timestamp": t, "input_length": 1024, "hash_ids": ids} for t, ids in enumerate([[1, 2], [3, 2], [1, 2]])]
    loaded = load(put(folder / "unchained.jsonl", *rows))
    assert requests_of(loaded.trace) == [[0, 1], [2, 3], [0, 1]]
    assert loaded.problems.renamed == 1
    assert any("renamed" in told for told in loaded.problems.summary())


def test_blocks_of_another_size_than_the_files_are_not_believed(folder: Path) -> None:
    source = put(folder / "small.jsonl", {"timestamp": 0, "input_length": 64, "hash_ids": [1, 2, 3, 4]})
    assert load(source, block_tokens=16).trace.distinct == 4
    with pytest.raises(ConfigError, match="4 ids for 64 tokens: are blocks of 512 tokens meant"):
        load(source)


def turn(t: float, tokens: int, rle: list[list[int]], **more: object) -> dict[str, object]:
    return {"t": t, "type": "s", "in": tokens, "out": 9, "rle": rle, **more}


def conversation(name: str, *requests: object) -> dict[str, object]:
    return {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": requests}


def test_conversations_are_laid_flat_and_over_each_other(folder: Path) -> None:
    source = put(
        folder / "talks.jsonl",
        conversation("b", turn(5, 640, [[1, 10]]), turn(9, 1100, [[1, 16], [40, 1]])),
        conversation(
            "a",
            turn(0, 512, [[1, 8]]),
            {"t": 4.0, "type": "subagent", "requests": [turn(0.5, 600, [[1, 4], [90, 5]]), turn(7, 64, [[300, 1]])]},
            turn(8, 1024, [[1, 16]]),
        ),
    )
    loaded = load(source, open_=2)
    trace = loaded.trace
    assert trace.name == "talks:open=2"
    assert trace.block_tokens == 512
    # Ids say nothing across conversations, and within one a block is there only if all of it is.
    by_session = [[requests_of(trace)[i] for i in np.flatnonzero(trace.sessions == s)] for s in range(2)]
    first, second = sorted(by_session, key=len)
    assert [len(ids) for ids in first] == [1, 2]
    assert first[0] == first[1][:1]
    assert [len(ids) for ids in second] == [1, 1, 2, 0]
    assert second[0] == second[2][:1] != second[1]
    assert not set(joined(*first)) & set(joined(*second))
    # Gaps inside a conversation stay.
    gaps = [np.diff(trace.times[trace.sessions == s]).round(2).tolist() for s in range(2)]
    assert sorted(gaps) == [[4.0], [4.5, 3.5, 3.0]]
    assert same(load(source, open_=2).trace, trace)
    small = load(source, open_=2, block_tokens=64).trace
    assert (len(small.ids), small.distinct) == (10 + 17 + 8 + 9 + 1 + 16, 17 + 16 + 5 + 1)


@pytest.mark.parametrize("source", ["zipf:requests=20,documents=2", "agentic:conversations=2,open=1", "timed.jsonl"])
def test_open_conversations_that_are_asked_for_in_vain_are_told(folder: Path, source: str) -> None:
    timed = put(folder / "timed.jsonl", {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]})
    source = timed if source == "timed.jsonl" else source
    without, told = load(source), load(source, open_=3)
    assert same(without.trace, told.trace) and without.trace.name == told.trace.name
    more = [note for note in told.problems.summary() if note not in without.problems.summary()]
    assert [note.partition(":")[0] for note in more] == ["--open 3 changes nothing"]


def test_open_conversations_that_make_a_difference_are_not_told(folder: Path) -> None:
    talks = put(folder / "talks.jsonl", conversation("a", turn(0, 64, [[1, 1]])))
    for source in (talks, "agentic:conversations=2"):
        assert not [note for note in load(source, open_=3).problems.summary() if "changes nothing" in note]


def test_conversations_start_so_that_as_many_are_open(folder: Path) -> None:
    talks = [conversation(f"{i}", turn(0, 64, [[1, 1]]), turn(100, 64, [[1, 1]])) for i in range(400)]
    source = put(folder / "open.jsonl", *talks)
    for open_ in (4, 40):
        trace = load(source, open_=open_).trace
        starts = [trace.times[trace.sessions == s].min() for s in range(400)]
        assert max(starts) - min(starts) == pytest.approx(400 * 100 / open_, rel=0.05)


def test_small_ids_that_are_not_chained_are_so_before_blocks_are_regrouped(folder: Path) -> None:
    """Both requests end their block with the small id 8, behind others."""
    talk = conversation("a", turn(0, 512, [[1, 8]]), turn(1, 512, [[11, 7], [8, 1]]))
    loaded = load(put(folder / "talks.jsonl", talk))
    assert requests_of(loaded.trace) == [[0], [1]]
    assert loaded.problems.renamed == 1


AZURE = ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03.9799600,4808,10",
         "2023-11-16 18:17:04.0319600,3180,8", "2023-11-16 18:17:02.0000000,110,27")  # fmt: skip


def test_lengths_as_azure_writes_them(folder: Path) -> None:
    loaded = load(put(folder / "AzureLLMInferenceTrace_code.csv", *AZURE))
    trace = loaded.trace
    assert trace.name == "AzureLLMInferenceTrace_code"
    assert trace.times.tolist() == pytest.approx([0, 1.97996, 2.03196])
    assert trace.inputs.tolist() == [110, 4808, 3180]
    assert trace.outputs.tolist() == [27, 10, 8]
    assert trace.distinct == 0 + 9 + 6
    assert trace.ceiling().sum() == 0
    assert any("no block is asked for twice" in told for told in loaded.problems.summary())


@pytest.mark.parametrize(
    ("row", "seconds"),
    [
        ({"timestamp": 2500, "input_length": 5, "output_length": 1}, 2.5),
        ({"timestamp": 2500, "prompt_tokens": 5, "completion_tokens": 1}, 2500),
        ({"t": 2500, "in": 5, "out": 1}, 2500),
        ({"arrival_time_ms": 2500, "inputTokens": 5, "output_tokens": 1}, 2.5),
        ({"arrived_at": 2500, "num_prefill_tokens": 5.0, "num_decode_tokens": "1"}, 2500),
        ({"Timestamp": "1970-01-01T02:41:40+02:00", "Request tokens": 5, "Response tokens": None}, 2500),
    ],
)
def test_lengths_under_their_usual_names(folder: Path, row: dict[str, object], seconds: float) -> None:
    first = {**row, next(iter(row)): 0}
    trace = load(put(folder / "lengths.jsonl", first, row)).trace
    assert trace.times.tolist() == [0, seconds]
    assert trace.inputs.tolist() == [5, 5]
    assert trace.outputs.tolist() == [1, 1] if None not in row.values() else [0, 0]


def test_the_page_lists_all_names_of_fields() -> None:
    page = (Path(__file__).parents[2] / "docs/traces.md").read_text()
    rows = re.findall(r"^\| (time|input|output|session|shared).* \| (.*) \|$", page, re.MULTILINE)
    assert {name: tuple(re.findall(r"`(\w+)`", names)) for name, names in rows} == lengths.NAMES


def test_turns_of_a_session_share_their_context(folder: Path) -> None:
    header = "arrival_time,prompt_tokens,session_id,shared_prefix_length"
    rows = ("0,1024,a,", "1,1024,b,512", "2,2048,a,", "3,2048,b,512", "4,1024,,512", "5,1024,,")
    trace = load(put(folder / "turns.csv", header, *rows)).trace
    assert requests_of(trace) == [[0, 1], [2, 3], [0, 1, 4, 5], [2, 6, 7, 8], [2, 9], [10, 11]]
    assert trace.sessions.tolist() == [0, 1, 0, 1, -1, -1]


# --- bad input -------------------------------------------------------------------------------

ROW = {"timestamp": 1, "input_length": 1024, "output_length": 2, "hash_ids": [1, 2]}
OWN = [{"format": "stepwell-trace", "version": 1, "block_tokens": 512}, {"t": 0, "in": 1024, "blocks": [[0, 2]]}]
TALK = conversation("a", turn(0, 512, [[1, 8]]))
DEEP = "[" * 100_000 + "]" * 100_000


def changed(row: dict[str, object], **fields: object) -> str:
    """JSON of `row` with other fields; a text of digits is a number of that many digits."""
    return json.dumps({**row, **fields})


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        *(
            ([ROW], line)
            for line in (
                "{",
                "nonsense",
                "\x00\x01",
                "[]",
                "{}",
                '"' + "x" * 1000,
                changed(ROW, input_length=-1),
                changed(ROW, input_length=10**30),
                changed(ROW, input_length=True),
                changed(ROW, output_length=-2),
                changed(ROW, hash_ids=["1", "2"]),
                changed(ROW, hash_ids=[1.5]),
                changed(ROW, hash_ids=[[1]]),
                changed(ROW, hash_ids=None),
                changed(ROW, hash_ids=[1, 2, 3]),
                changed(ROW, timestamp=float("nan")),
                changed(ROW, timestamp=float("inf")),
                changed(ROW, timestamp="soon"),
                changed(ROW, timestamp=10**300),
                changed(ROW, session_id=[1]),
                json.dumps(ROW).replace("[1, 2]", "[" + "9" * 5000 + "]"),
                json.dumps(ROW).replace("[1, 2]", DEEP),
            )
        ),
        *(
            (OWN, json.dumps({"t": 1, "in": 1024, "blocks": blocks}))
            for blocks in ([[0, 3]], [[0, 0]], [[-1, 1]], [[0]], [[2**62, 1]], [[0, 2**62]], [0, 1], "0")
        ),
        (OWN, changed(OWN[0])),
        *(
            ([TALK], json.dumps(bad))
            for bad in (
                conversation("b"),
                conversation("b", turn(0, 512, [[1, 9]])),
                conversation("b", {"t": 0, "in": 5}),
                conversation("b", {"t": 0, "requests": [{"t": 1}]}),
                {**TALK, "block_size": 100},
                {**TALK, "block_size": 0},
                {**TALK, "hash_id_scope": "global"},
            )
        ),
        *(
            (AZURE, line)
            for line in (
                "1,2",
                "1,2,3,4",
                "now,2,3",
                "1,two,3",
                "1,nan,3",
                "1,2.5,3",
                "1,-2,3",
                f"{10**400},2,3",
                "1,,3",
            )
        ),
        ([{"t": 0, "in": 5}], '{"in": 5}'),
        ([{"t": 0, "in": 5}], '{"t": 1, "in": true}'),
        ([{"t": 0, "in": 5}], '{"t": null, "in": 5}'),
        ([{"t": 0, "in": 5, "prefix_tokens": 1}], '{"t": 0, "in": 5, "prefix_tokens": 6}'),
    ],
)
def test_a_malformed_line_is_left_out_and_told(folder: Path, good: Sequence[object], bad: str) -> None:
    source = put(folder / "bad.jsonl", *good, "", bad, good[-1])
    loaded = load(source)
    clean = load(put(folder / "good.jsonl", *good, good[-1])).trace
    assert same(loaded.trace, clean)
    assert loaded.problems.malformed == 1
    (malformed,) = loaded.problems.first
    assert malformed.line == len(good) + 2
    assert malformed.why and len(malformed.why) < 200
    assert "9" * 20 not in malformed.why and "xxx" not in malformed.why, "what a line holds is not told"
    with pytest.raises(ConfigError, match=f"line {malformed.line} ") as caught:
        load(source, strict=True)
    assert caught.value.code == "SW-122"


def test_many_malformed_lines_are_a_count(folder: Path) -> None:
    loaded = load(put(folder / "many.jsonl", ROW, *["{"] * 1000))
    assert loaded.problems.malformed == 1000
    told = loaded.problems.summary()
    assert [line.split(":")[0] for line in told[:5]] == [f"line {i}" for i in range(2, 7)]
    assert "1,000 malformed lines" in told[5]


def test_a_malformed_first_line_does_not_hide_the_format(folder: Path) -> None:
    for rows in ([ROW], AZURE):
        loaded = load(put(folder / "late.jsonl", '{"timestamp": 1, "input_leng', *rows))
        assert loaded.problems.malformed == 1


@pytest.mark.parametrize(
    ("rows", "code", "says"),
    [
        ((), "SW-122", "it is empty"),
        (("", " "), "SW-122", "it is empty"),
        (("some words", "more words"), "SW-121", "lengths"),
        (({"timestmp": 1, "input_lenght": 5},), "SW-121", "input_lenght is perhaps meant to be input_length"),
        ((OWN[1],), "SW-122", "no header"),
        (({**OWN[0], "version": 2}, OWN[1]), "SW-122", "version 2"),
        ((OWN[0],), "SW-122", "no request in it"),
        (({**ROW, "input_length": -1},), "SW-122", "line 1: "),
        ((AZURE[0],), "SW-122", "no request"),
    ],
)
def test_a_file_that_is_no_trace(folder: Path, rows: Sequence[object], code: str, says: str) -> None:
    source = put(folder / "none.jsonl", *rows)
    with pytest.raises(ConfigError) as caught:
        load(source)
    assert caught.value.code == code
    assert says in str(caught.value)


def test_a_name_that_is_no_utf_8_can_stand_in_json(folder: Path) -> None:
    path = folder / os.fsdecode(b"a\xff.jsonl")
    path.write_bytes(b'{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n')
    assert msgspec.json.decode(msgspec.json.encode(load(str(path)).trace.name)) == "a\\udcff"


def test_a_format_can_be_named(folder: Path) -> None:
    source = put(folder / "named.jsonl", ROW)
    assert load(source, format_="lengths").trace.distinct == 2
    with pytest.raises(ConfigError, match=r"did you mean mooncake\?.*SW-121"):
        load(source, format_="moncake")
    with pytest.raises(ConfigError, match="SW-122"):
        load(source, format_="conversations")


def test_sources_that_are_nothing(folder: Path) -> None:
    put(folder / "chat.jsonl", ROW)
    for source in (str(folder / "chta.jsonl"), "zpif:seed=1", "", "\x00", "x" * 5000, "~nobody-at-all/x"):
        with pytest.raises(ConfigError) as caught:
            load(source)
        assert caught.value.code == "SW-121"
        meant = {"chta": "mean chat.jsonl?", "zpif": "mean zipf?"}
        assert all(fix in caught.value.fix for name, fix in meant.items() if name in source)
    with pytest.raises(ConfigError, match=r"cannot be read.*SW-122"):
        load(str(folder))


@pytest.mark.parametrize("wish", [{"open_": 0}, {"open_": 2**40}, {"block_tokens": 0}, {"block_tokens": -512}])
def test_wishes_that_cannot_be(wish: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="SW-122"):
        load("cyclic", **wish)  # type: ignore[arg-type]


def test_a_trace_too_large_for_memory_is_refused_before_it_is_made(folder: Path) -> None:
    header = {"format": "stepwell-trace", "version": 1, "block_tokens": 1}
    source = put(folder / "huge.jsonl", header, *[{"t": i, "in": 2**27, "blocks": [[0, 2**27]]} for i in range(2)])
    with pytest.raises(ConfigError, match=r"more than .* blocks.*SW-122"):
        load(source)


@pytest.mark.parametrize("rows", [[ROW, ROW], OWN, [TALK, {**TALK, "id": "b"}], AZURE])
def test_each_format_has_that_bound(folder: Path, rows: Sequence[object], monkeypatch: pytest.MonkeyPatch) -> None:
    source = put(folder / "bound.jsonl", *rows)
    ids = len(load(source).trace.ids)
    monkeypatch.setattr(chains, "MAX_IDS", ids)
    load(source)
    monkeypatch.setattr(chains, "MAX_IDS", ids - 1)
    with pytest.raises(ConfigError, match=r"more than .* blocks.*SW-122"):
        load(source)


def test_a_byte_order_mark_is_no_part_of_the_first_line(folder: Path) -> None:
    for rows in ([json.dumps(ROW)], AZURE[:2]):
        assert len(load(put(folder / "marked.jsonl", "\ufeff" + rows[0], *rows[1:])).trace) == 1


def packed(path: Path, rows: int) -> bytes:
    with writer(path) as file:
        file.writelines(json.dumps({**ROW, "timestamp": i * i}).encode() + b"\n" for i in range(rows))
    return path.read_bytes()


def test_a_compressed_file_that_is_cut_off_gives_what_is_there(folder: Path) -> None:
    path = folder / "cut.jsonl.zst"
    whole = packed(path, 20_000)
    assert len(load(str(path)).trace) == 20_000
    path.write_bytes(whole[: len(whole) * 3 // 4])
    loaded = load(str(path))
    assert 0 < len(loaded.trace) < 20_000
    assert loaded.problems.cut
    assert any("not read to its end" in told for told in loaded.problems.summary())
    with pytest.raises(ConfigError, match="cut off or damaged"):
        load(str(path), strict=True)
    path.write_bytes(whole[:20])
    with pytest.raises(ConfigError, match="SW-122"):
        load(str(path))


@given(st.integers(0, 10**9), st.integers(1, 255))
def test_a_damaged_compressed_file_is_never_a_crash(folder: Path, at: int, flip: int) -> None:
    path = folder / "damaged.jsonl.zst"
    data = bytearray(packed(path, 50))
    data[at % len(data)] ^= flip
    path.write_bytes(data)
    try:
        load(str(path))
    except ConfigError as error:
        assert error.code in ("SW-121", "SW-122")


def test_a_line_beyond_all_bounds_ends_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE", 1000)
    loaded = load(put(folder / "long.jsonl", ROW, ROW, "x" * 999 + "y", ROW))
    assert len(loaded.trace) == 2
    assert "behind line 2" in loaded.problems.cut


def test_without_zstd_the_error_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "packed.jsonl.zst"
    packed(path, 1)
    package, _, module = zstd().__name__.partition(".")
    monkeypatch.delattr(sys.modules[package], module, raising=False)
    monkeypatch.setitem(sys.modules, f"{package}.{module}", None)
    with pytest.raises(ConfigError, match=r"\[simulate\].*SW-113"):
        load(str(path))
    assert len(load(put(folder / "plain.jsonl", ROW)).trace) == 1


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = ("timestamp", "input_length", "output_length", "hash_ids", "session_id", "t", "in", "out", "blocks", "requests",
        "rle", "block_size")  # fmt: skip
LINES = (
    st.binary(max_size=40)
    | st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6).map(lambda row: json.dumps(row).encode())
    | st.sampled_from([ROW, *OWN, TALK, *AZURE]).map(
        lambda row: (row if isinstance(row, str) else json.dumps(row)).encode()
    )
)


@given(st.lists(LINES, max_size=8), st.sampled_from([None, "stepwell", "conversations", "mooncake", "lengths"]))
def test_no_line_crashes_a_reader(folder: Path, rows: list[bytes], format_: str | None) -> None:
    path = folder / "any.jsonl"
    path.write_bytes(b"\n".join(rows))
    try:
        trace = load(str(path), format_=format_).trace
    except ConfigError as error:
        assert error.code in ("SW-121", "SW-122")
        return
    assert len(trace) == len(trace.inputs) == len(trace.starts) - 1
    assert trace.times[0] == 0 and bool(np.all(np.diff(trace.times) >= 0)) and bool(np.isfinite(trace.times).all())
    assert is_chained(requests_of(trace))
