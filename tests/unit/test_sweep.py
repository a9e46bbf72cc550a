"""`stepwell simulate`: tables of points, in parallel, gone on with, and what is said to nonsense."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from small_traces import BLOCK, trace_of
from typer.testing import CliRunner

from stepwell.cli.commands import app
from stepwell.errors import ConfigError, StepwellError
from stepwell.policies.catalog import POLICIES
from stepwell.policies.costs.hardware import preset
from stepwell.simulate import options
from stepwell.simulate import sweep as sweeping
from stepwell.simulate.point import NAMES, SweepRow, point
from stepwell.simulate.sweep import SweepCapacity, SweepPoint, SweepRequest, sweep

COST = "llama-3.1-8b@h100"

SMALL = "zipf:requests=150,documents=20,tokens=600,system=64"

TRACES = (
    trace_of(["abcd", "abxy", "abcd", "q", "abx", "abcd"] * 3, name="one"),
    trace_of(["ab", "cd", "ef"] * 4, name="other"),
)


def wanted(policies: str = "auto,lru,opt", sizes: tuple[int, ...] = (2, 5)) -> SweepRequest:
    return SweepRequest(TRACES, policies.split(","), [SweepCapacity(size * BLOCK) for size in sizes], COST)


def untimed(row: SweepRow) -> SweepRow:
    return replace(row, references_per_s=0)


def rows(asked: SweepRequest, keep: Path | None = None) -> dict[SweepPoint, SweepRow]:
    found = list(sweep(asked, keep=keep))
    assert len(found) == len(dict(found)), "each point once"
    return {at: untimed(row) for at, row in found}


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[SweepPoint]:
    """The points that were not taken from a file."""
    found: list[SweepPoint] = []
    real = sweeping._row

    def counted(asked: SweepRequest, at: SweepPoint) -> SweepRow:
        found.append(at)
        return real(asked, at)

    monkeypatch.setattr(sweeping, "_row", counted)
    return found


# --- a point


def test_a_row_says_what_was_hit_and_what_that_saved() -> None:
    trace = trace_of(["abc", "abd", "abc"])  # 48 tokens each
    cost = preset(COST)
    row = point(trace, "lru", 4 * BLOCK, cost, COST)
    assert untimed(row) == SweepRow(
        trace="small",
        policy="lru",
        capacity_tokens=64,
        hit_tokens_ratio=round((32 + 48) / 144, 6),
        saved_prefill_s=round(cost.seconds(32) + cost.seconds(48), 3),
        spilled_tokens=64,
        references_per_s=0,
        cost=COST,
        ceiling_ratio=round((32 + 48) / 144, 6),
        prefill_s=round(3 * cost.seconds(48), 3),
        requests=3,
        input_tokens=144,
        working_set_tokens=64,
        block_tokens=16,
    )
    assert row.references_per_s > 0


def test_a_last_block_that_is_not_full_counts_as_the_tokens_that_it_has() -> None:
    whole = trace_of(["ab", "ab"])
    trace = replace(whole, inputs=whole.inputs - 6)
    assert point(trace, "lru", 1000, preset(COST), COST).hit_tokens_ratio == 0.5


def test_a_capacity_is_rounded_down_to_blocks() -> None:
    trace = trace_of(["ab", "ab"])
    found = [point(trace, name, 2 * BLOCK - 1, preset(COST), COST).hit_tokens_ratio for name in ("lru", "opt")]
    assert found == [0.25, 0.25]
    for name in NAMES:
        row = point(trace, name, BLOCK - 1, preset(COST), COST)
        assert (row.hit_tokens_ratio, row.spilled_tokens) == (0, 0)


def test_an_empty_trace_of_blocks_is_a_row_of_nothing() -> None:
    trace = trace_of(["", ""])
    for name in NAMES:
        row = point(trace, name, 1000, preset(COST), COST)
        assert (row.hit_tokens_ratio, row.saved_prefill_s, row.working_set_tokens) == (0, 0, 0)


def test_the_catalog_and_the_optimum_have_the_names_that_were_promised() -> None:
    assert set(NAMES) == {*["auto", "lru", "lfu", "arc", "s3fifo", "sieve", "lru2", "second_touch", "gdsf", "opt"]}
    assert all(make() is not make() and make().eviction is not make().eviction for make in POLICIES.values())


# --- sweeps


def test_points_are_all_combinations_each_once() -> None:
    asked = SweepRequest(
        TRACES, ["lru", "opt"], [SweepCapacity(share=0.5), SweepCapacity(share=0.51), SweepCapacity(32)], COST
    )
    assert asked.points() == [
        SweepPoint(0, "lru", 48), SweepPoint(0, "opt", 48), SweepPoint(0, "lru", 32), SweepPoint(0, "opt", 32),
        SweepPoint(1, "lru", 48), SweepPoint(1, "opt", 48), SweepPoint(1, "lru", 32), SweepPoint(1, "opt", 32),
    ]  # fmt: skip


def test_processes_come_to_the_same() -> None:
    """In a process of its own: a pool brings results as pickles from its own children, and `conftest` allows none."""
    arguments = [SMALL, "--policy", "auto,lru,opt", "--capacity-tokens", "10%,50%", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "stepwell", "simulate", *arguments, "--processes", "3"],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    one, other = (
        [{**row, "references_per_s": 0} for row in json.loads(out)["rows"]]
        for out in (invoke(*arguments)[0], done.stdout)
    )
    assert one == other
    assert len(one) == 6


def test_a_sweep_goes_on_where_it_was_left(tmp_path: Path, computed: list[SweepPoint]) -> None:
    keep = tmp_path / "rows.jsonl"
    begun = sweep(wanted(), keep=keep)
    first = [next(begun) for _ in range(5)]
    begun.close()
    assert len(computed) == 5
    again = rows(wanted(), keep=keep)
    assert computed == wanted().points(), "only the rest"
    assert again == rows(wanted())
    del computed[:]
    later = list(sweep(wanted("lru,auto"), keep=keep))
    assert not computed
    assert set(first) <= {*later, *sweep(wanted("opt"), keep=keep)}, "rows as they were, times and all"


def test_a_row_is_taken_only_where_all_that_it_depends_on_is_the_same(
    tmp_path: Path, computed: list[SweepPoint]
) -> None:
    keep = tmp_path / "rows.jsonl"
    trace = TRACES[0]
    base = SweepRequest([trace], ["lru"], [SweepCapacity(64)], COST)
    others = [
        replace(base, policies=["lfu"]),
        replace(base, capacities=[SweepCapacity(80)]),
        replace(base, cost="llama-3.1-70b@h100"),
        *(
            replace(base, traces=[other])
            for other in (
                replace(trace, name="renamed"),
                replace(trace, times=trace.times * 2),
                replace(trace, inputs=trace.inputs - 1),
                replace(trace, block_tokens=32),
                trace_of(["abcd", "abxy", "abcd", "q", "abx", "abxy"] * 3, name="one"),
            )
        ),
    ]
    for asked in (base, *others):
        rows(asked, keep=keep)
    assert len(computed) == 1 + len(others)
    for asked in (base, *others):
        assert rows(asked, keep=keep) == rows(asked)


@pytest.mark.parametrize("left", [0, 1, 5, 40, -2, -1])
def test_a_last_line_that_was_cut_is_computed_again(tmp_path: Path, computed: list[SweepPoint], left: int) -> None:
    """And does not spoil the file for the next time."""
    keep = tmp_path / "rows.jsonl"
    rows(wanted(), keep=keep)
    *whole, last = keep.read_bytes().splitlines(keepends=True)
    keep.write_bytes(b"".join(whole) + last[:left])
    del computed[:]
    assert rows(wanted(), keep=keep) == rows(wanted())
    del computed[:]
    rows(wanted(), keep=keep)
    assert not computed
    assert len(keep.read_bytes().splitlines()) == len(whole) + 1


@pytest.mark.parametrize(
    "content", [b"hello\n", b"hello", b'{"key": "x"}\n', b'{"rows":[]}', b"\n", b'{"key":"a","row":{"trace":1}}\n{"k']
)
def test_a_foreign_file_is_left_as_it_is(tmp_path: Path, computed: list[SweepPoint], content: bytes) -> None:
    keep = tmp_path / "notes"
    keep.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        rows(wanted(), keep=keep)
    assert caught.value.code == "SW-123"
    assert keep.read_bytes() == content
    assert not computed


@pytest.mark.parametrize("where", ["", "missing/rows", "file/rows"])
def test_a_place_that_cannot_be_written_is_told_before_anything_is_computed(
    tmp_path: Path, computed: list[SweepPoint], where: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:
        rows(wanted(), keep=tmp_path / where)
    assert caught.value.code == "SW-123"
    assert not computed


def test_an_unknown_cost_is_told_before_anything_is_done(tmp_path: Path) -> None:
    keep = tmp_path / "rows.jsonl"
    with pytest.raises(ConfigError) as caught:
        rows(replace(wanted(), cost="llama-3.1-8b@h10"), keep=keep)
    assert caught.value.code == "SW-115"
    assert "llama-3.1-8b@h100" in caught.value.fix
    assert not keep.exists()


# --- wishes


def test_policies_are_named_once_each() -> None:
    assert options.policies("LRU, opt,lru,,auto ") == ["lru", "opt", "auto"]


def test_the_old_name_of_a_policy_is_the_new_one() -> None:
    assert options.policies("default,lru,auto") == ["auto", "lru"]


@pytest.mark.parametrize(
    ("text", "fix"),
    [("lur", "did you mean lru?"), ("lru,second-touch", "did you mean second_touch?"), ("zzz", "name one of them")],
)
def test_an_unknown_policy_is_told_with_what_was_meant(text: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options.policies(text)
    assert caught.value.code == "SW-124"
    assert caught.value.fix == fix
    assert all(name in caught.value.why for name in NAMES)


@pytest.mark.parametrize("text", ["", " , "])
def test_no_policy_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options.policies(text)
    assert caught.value.code == "SW-124"


def test_capacities_are_tokens_or_shares() -> None:
    found = options.capacities("500000, 1.5M,2k,3 G,1.5m,5%,0.5 %,100%,10^15".replace("10^15", "1000000000000000"))
    assert found == [
        SweepCapacity(500_000), SweepCapacity(1_500_000), SweepCapacity(2_000), SweepCapacity(3_000_000_000),
        SweepCapacity(share=0.05), SweepCapacity(share=0.005), SweepCapacity(share=1), SweepCapacity(10**15),
    ]  # fmt: skip
    assert [one.tokens(TRACES[0]) for one in options.capacities("50%,1%,100%,7")] == [48, BLOCK, 112, 7]


@pytest.mark.parametrize(
    "text",
    ["", ",", "0", "0%", "0.9", "-1", "-5%", "1e5", "inf", "nan", "5%%", "1.M", ".5M", "1 000", "1T", "% 5", "much",
     "101%", "9" * 30 + "%", "9" * 400 + "%", "1000000000000001", "9" * 400, "1000001G", "100,lots"],
)  # fmt: skip
def test_a_capacity_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options.capacities(text)
    assert caught.value.code == "SW-125"
    assert len(caught.value.what) < 200


# --- the command


def invoke(*arguments: str) -> tuple[str, str]:
    done = CliRunner().invoke(app, ["simulate", *arguments, "--processes", "1"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0
    return done.stdout, done.stderr


def test_one_line_of_json_with_a_row_for_each_point() -> None:
    out, _ = invoke(SMALL, "cyclic:requests=60,documents=6,tokens=300", "--policy", "lru,opt", "--capacity-tokens",
                    "20%,2048", "--block-tokens", "32", "--json")  # fmt: skip
    assert out.endswith("}\n") and out.count("\n") == 1
    made = json.loads(out)["rows"]
    assert [(row["trace"].partition(":")[0], row["policy"]) for row in made] == [
        (trace, policy) for trace in ("zipf", "cyclic") for _ in range(2) for policy in ("lru", "opt")
    ]
    for row in made:
        assert msgspec.convert(row, SweepRow)
        assert {"trace", "policy", "capacity_tokens", "hit_tokens_ratio", "saved_prefill_s", "spilled_tokens",
                "references_per_s", "cost"} <= row.keys()  # fmt: skip
        assert row["cost"] == COST and row["block_tokens"] == 32
        assert 0 <= row["hit_tokens_ratio"] <= row["ceiling_ratio"] < 1
        assert row["saved_prefill_s"] <= row["prefill_s"]
        assert row["references_per_s"] > 0
    assert made[1]["capacity_tokens"] == made[0]["capacity_tokens"] != 2048 == made[2]["capacity_tokens"]
    assert made[0]["hit_tokens_ratio"] < made[1]["hit_tokens_ratio"]


def test_a_table_for_people() -> None:
    out, _ = invoke(SMALL, "--policy", "lru,sieve", "--capacity-tokens", "2k,4k")
    assert "150 requests of" in out and COST in out
    lines = [line.split() for line in out.splitlines()[3:]]
    assert [line[:2] for line in lines] == [[size, name] for size in ("2,000", "4,000") for name in ("lru", "sieve")]


def test_a_share_of_next_to_nothing_is_a_block() -> None:
    out, _ = invoke("zipf:requests=20,documents=2,tokens=600,system=64", "--capacity-tokens", "5%", "--json")
    assert {row["capacity_tokens"] for row in json.loads(out)["rows"]} == {512}


def test_what_was_read_over_is_told_beside_the_line(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = ['{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}'] * 3
    file.write_text("\n".join([*lines, "nonsense", ""]))
    out, err = invoke(str(file), "--policy", "lru", "--capacity-tokens", "100%", "--json")
    assert json.loads(out)["rows"][0]["hit_tokens_ratio"] == pytest.approx(2 / 3, abs=1e-6)
    assert "line 4" in err and "1 malformed line left out" in err


def test_the_command_goes_on_from_a_file(tmp_path: Path) -> None:
    keep = tmp_path / "rows"
    arguments = [SMALL, "--policy", "lru,auto", "--capacity-tokens", "10%", "--keep", str(keep), "--json"]
    assert invoke(*arguments) == invoke(*arguments), "rows as they were, times and all"
    assert len(keep.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["nowhere.jsonl"], "SW-121"),
        ([SMALL, "--policy", "lrú"], "SW-124"),
        ([SMALL, "--capacity-tokens", "all"], "SW-125"),
        ([SMALL, "--cost", "gpt@abacus"], "SW-115"),
    ],
)
def test_nonsense_has_a_code(arguments: list[str], code: str) -> None:
    with pytest.raises(StepwellError) as caught:
        invoke(*arguments)
    assert caught.value.code == code


def test_a_cluster_comes_to_the_same() -> None:
    """In a process of its own: Ray's messages are pickles, which nothing else here may read."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    command = [sys.executable, "-m", "stepwell", "simulate", SMALL, "--policy", "lru,auto", "--json"]
    here, there = (
        json.loads(subprocess.run([*command, *more], capture_output=True, check=True).stdout)["rows"]
        for more in ([], ["--ray", "local"])
    )
    assert [row | {"references_per_s": 0} for row in here] == [row | {"references_per_s": 0} for row in there]


def test_without_a_cluster_it_is_said_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"stepwell\[ray\]") as caught:
        list(sweep(wanted(), cluster="auto"))
    assert caught.value.code == "SW-127"
