"""What the benchmarks' numbers rest on: statistics, verdicts, machine facts, processor time of others. No timing."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from lab.bench import processes, report
from lab.bench.__main__ import NAMES, main
from lab.bench.report import Result, Row, Target
from lab.bench.serving.noreuse import Cost, rows
from lab.bench.speculation.drafters import RECALLED, WITHOUT
from stepwell.demo.results import stats
from stepwell.demo.results.stats import Estimate
from stepwell.ops import machine

SEED = 5


def sample(count: int, *, mean: float = 10.0, seed: int = SEED) -> list[float]:
    print("seed", seed)
    source = random.Random(seed)
    return [source.gauss(mean, 1.0) for _ in range(count)]


# --- statistics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("percent", [50, 90, 99])
def test_a_percentile_is_numpys_and_lies_in_its_interval(percent: float) -> None:
    values = sample(500)
    found = stats.percentile(values, percent)
    assert found.value == np.percentile(values, percent)
    assert found.low <= found.value <= found.high
    assert found.low < found.high
    assert found.count == 500
    assert found == stats.percentile(values, percent), "the same samples give the same interval"


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    held = sum(
        found.low <= 10.0 <= found.high for found in (stats.median(sample(60, seed=seed)) for seed in range(100))
    )
    assert 85 <= held <= 100


def test_more_samples_make_narrower_intervals() -> None:
    few, many = stats.median(sample(30)), stats.median(sample(3000))
    assert many.high - many.low < (few.high - few.low) / 4


def test_resampling_in_pieces_changes_nothing_but_the_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    values = sample(400)
    whole = stats.percentile(values, 50)
    monkeypatch.setattr(stats, "_CHUNK", 1000)
    pieces = stats.percentile(values, 50)
    assert pieces.value == whole.value
    assert pieces.low == pytest.approx(whole.low, abs=0.05)
    assert pieces.high == pytest.approx(whole.high, abs=0.05)


def test_a_ratio_of_percentiles_of_two_groups() -> None:
    found = stats.ratio_of_percentiles(sample(300, mean=20.0), sample(200, mean=10.0, seed=6), 50)
    assert found.low < 2.0 < found.high
    assert found.count == 200


def test_a_value_is_told_in_another_unit_with_its_interval() -> None:
    assert Estimate(1.0, 0.5, 2.0, 7).times(1e3) == Estimate(1e3, 500.0, 2e3, 7)
    assert Estimate(1.0, 0.5, 2.0, 7).plus(-1.0) == Estimate(0.0, -0.5, 1.0, 7)


def test_nothing_measured_is_said() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        stats.median([])


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("relation", "bound", "value", "met"),
    [
        ("<=", 1.05, 1.05, True),
        ("<=", 1.05, 1.051, False),
        ("<", 10, 10, False),
        (">=", 0.8, 0.8, True),
        (">=", 0.8, 0.7, False),
    ],
)
def test_a_target_is_met_or_missed(relation: str, bound: float, value: float, met: bool) -> None:
    row = Row("x", "", Estimate(value, value, value, 1), Target(relation, bound))
    assert row.met is met
    assert ("MISSED" in report.table(Result("b", [row]))) is not met


def test_what_has_no_target_or_no_value_is_not_judged() -> None:
    read_only = Row("to read", "ms", Estimate(1.0, 1.0, 1.0, 1))
    unmeasured = Row("no way", "ms", None, Target("<", 1.0), "why not")
    assert read_only.met is None and unmeasured.met is None
    text = report.table(Result("b", [read_only, unmeasured], {"pairs": 3}, ["a remark"]))
    assert "MISSED" not in text and "not measured" in text and "why not" in text
    assert "pairs 3" in text and "a remark" in text


def test_a_result_is_kept_with_everything_a_reader_needs(tmp_path: Path) -> None:
    missed = Row("slow", "ms", Estimate(12.5, 11.0, 14.0, 9), Target("<", 10.0), "p50 3")
    path = report.save(
        Result("b", [missed], {"dropped": 1}, ["r"]), tmp_path / "new", {"cpu": "z"}, command="c", quick=True
    )
    assert path == tmp_path / "new" / "b.json"
    assert json.loads(path.read_text()) == {
        "benchmark": "b",
        "command": "c",
        "quick": True,
        "rows": [
            {
                "what": "slow",
                "unit": "ms",
                "target": "< 10",
                "measured": 12.5,
                "interval": [11.0, 14.0],
                "samples": 9,
                "met": False,
                "beside": "p50 3",
            }
        ],
        "counts": {"dropped": 1},
        "remarks": ["r"],
        "machine": {"cpu": "z"},
    }


def test_the_steadier_ratio_is_judged() -> None:
    source = random.Random(SEED)
    steady_wall = [(Cost(1.0, source.uniform(0.5, 2.0)), Cost(1.0, 1.0)) for _ in range(20)]
    judged = [row for row in rows("host", steady_wall) if row.target is not None]
    assert [row.what for row in judged] == ["host: wall seconds per request over plain vLLM's"]
    assert judged[0].met
    steady_cpu = [(Cost(b.cpu_s, 1.1 * b.wall_s), Cost(source.uniform(0.5, 2.0), 1.0)) for _, b in steady_wall]
    judged = [row for row in rows("host", steady_cpu) if row.target is not None]
    assert [(row.what, row.met) for row in judged] == [("host: CPU seconds per request over plain vLLM's", False)]


def test_no_pairs_is_no_verdict() -> None:
    (row,) = rows("host", [])
    assert row.met is None


# --- the machine ------------------------------------------------------------------------------------------------------


def test_facts_name_no_machine_and_no_path() -> None:
    found = machine.facts()
    assert {"date", "cpu", "cores", "kernel", "python", "packages", "revision", "load_average"} <= found.keys()
    assert found["cores"] == len(os.sched_getaffinity(0))
    text = json.dumps(found)
    forbidden = [socket.gethostname(), str(Path(__file__).parents[3]), str(Path.home())]
    assert not [name for name in forbidden if len(name) > 3 and name in text]  # shorter ones are in any text


def test_the_processor_is_told_with_its_numbers() -> None:
    cpuinfo = "processor\t: 0\ncpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Some Processor\n\nprocessor\t: 1\n"
    assert machine.cpu_model(cpuinfo) == "Some Processor (family 6, model 143)"
    assert machine.cpu_model("") == os.uname().machine


def test_a_kernel_is_its_number(tmp_path: Path) -> None:
    assert machine.kernel("6.18.44-custom-build7") == "6.18.44"
    assert machine.kernel("odd") == "unknown"
    setting = tmp_path / "enabled"
    setting.write_text("always [madvise] never\n")
    assert machine.huge_pages(setting) == "madvise"
    assert machine.huge_pages(tmp_path / "none") == "unknown"


def test_a_revision_where_there_is_one(tmp_path: Path) -> None:
    assert machine.revision(tmp_path) is None
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-c", "init.defaultBranch=m"]
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_text("1")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *arguments], cwd=tmp_path, check=True)
    clean = machine.revision(source)
    assert clean is not None and len(clean) == 12
    (tmp_path / "result").write_text("1")
    assert machine.revision(source) == clean, "results are no source"
    (source / "file").write_text("2")
    assert machine.revision(source) == f"{clean}-changed"


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[str]]:
    """A process that burns its processor from its first line on."""
    code = "print('ready', flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_the_processor_time_of_another_process(busy: subprocess.Popen[str]) -> None:
    before = processes.cpu_seconds([busy.pid])
    ticks = _ticks(busy.pid)
    while _ticks(busy.pid) < ticks + 10:
        time.sleep(0.02)
    spent = processes.spent_between(before, processes.cpu_seconds([busy.pid]))
    assert spent is not None
    assert spent > 8 / os.sysconf("SC_CLK_TCK"), "as much as the kernel's coarser count, but for its rounding"


def test_a_process_that_came_or_went_spoils_the_count(busy: subprocess.Popen[str]) -> None:
    before = processes.cpu_seconds([busy.pid, os.getpid()])
    busy.kill()
    busy.wait()
    after = processes.cpu_seconds([busy.pid, os.getpid()])
    assert after.keys() == {os.getpid()}
    assert processes.spent_between(before, after) is None
    assert processes.spent_between(after, before) is None


def test_who_is_halted_goes_on_afterwards(busy: subprocess.Popen[str]) -> None:
    with processes.halted([busy.pid]):
        while _state(busy.pid) != "T":
            time.sleep(0.005)
        before = processes.cpu_seconds([busy.pid])
        time.sleep(0.05)
        assert processes.cpu_seconds([busy.pid]) == before
    while _state(busy.pid) == "T":
        time.sleep(0.005)


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _state(pid: int) -> str:
    return _stat(pid)[0]


def _ticks(pid: int) -> int:
    return int(_stat(pid)[11]) + int(_stat(pid)[12])


# --- the command ------------------------------------------------------------------------------------------------------


def test_an_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["lockup"])
    error = capsys.readouterr().err
    assert all(name in error for name in NAMES)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A runtime directory of its own."""
    with tempfile.TemporaryDirectory(prefix="sw", dir="/tmp") as folder:  # short, as socket paths must be
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("vllm") is None, reason="the adapter's halves need vLLM")
@pytest.mark.parametrize("name", ["lookup", "hooks", "firstspill"])
def test_a_benchmark_without_an_engine_runs(name: str, tmp_path: Path, runtime: None) -> None:
    """In a few seconds, over real wells: every row is there, whatever it says."""
    assert main([name, "--quick", "--out", str(tmp_path)]) == 0
    kept = json.loads((tmp_path / f"{name}.json").read_text())
    assert kept["quick"] and kept["command"] == f"python -m lab.bench {name} --quick"
    assert [row for row in kept["rows"] if row["target"] and row["measured"] is not None]
    assert str(tmp_path) not in json.dumps(kept)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("vllm") is None, reason="real engines")
@pytest.mark.parametrize(("name", "targets"), [("repeats", 2), ("oversize", 2), ("windows", 1)])
def test_a_benchmark_with_engines_runs(name: str, targets: int, tmp_path: Path, runtime: None) -> None:
    """In minutes: what is judged was recalled."""
    assert main([name, "--quick", "--out", str(tmp_path)]) == 0
    kept = json.loads((tmp_path / f"{name}.json").read_text())
    judged = [row for row in kept["rows"] if row["target"]]
    assert len(judged) == targets and all(row["measured"] for row in judged)
    assert str(tmp_path) not in json.dumps(kept)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("vllm") is None, reason="real engines")
def test_drafts_after_recalls_are_those_after_hits(tmp_path: Path, runtime: None) -> None:
    """In minutes: the drafts are counted, and without its KV a draft model is of less use."""
    assert main(["drafters", "--quick", "--out", str(tmp_path)]) == 0
    rows = {row["what"]: row for row in json.loads((tmp_path / "drafters.json").read_text())["rows"]}
    assert [row["met"] for row in rows.values() if row["target"]] == [True, True]
    recalled, without = (f"a draft model, {way}: accepted of what was drafted" for way in (RECALLED, WITHOUT))
    assert rows[recalled]["measured"] > rows[without]["measured"]


@pytest.mark.nightly
def test_rates_of_the_wells_thread_are_measured_with_and_without_a_disk(tmp_path: Path, runtime: None) -> None:
    assert main(["rates", "--quick", "--out", str(tmp_path)]) == 0
    kept = json.loads((tmp_path / "rates.json").read_text())
    assert len([row for row in kept["rows"] if row["target"]]) == 4
    assert all(row["measured"] > 0 for row in kept["rows"])
    assert kept["counts"]["incomplete"] == 0, "what is timed is answered in full"


@pytest.mark.nightly
def test_a_blocks_cost_is_measured_for_each_operation(tmp_path: Path, runtime: None) -> None:
    assert main(["blockcost", "--quick", "--out", str(tmp_path)]) == 0
    kept = json.loads((tmp_path / "blockcost.json").read_text())
    assert {row["operation"] for row in kept["rows"]} == {"lookup", "recall", "spill", "miss"}
    assert all(row["measured"] > 0 for row in kept["rows"])
    assert kept["counts"]["operations"] > 0
    assert kept["counts"]["incomplete"] == 0, "what is timed is answered in full"


def test_the_index_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    assert main(["index", "--quick", "--out", str(tmp_path)]) == 0
    kept = json.loads((tmp_path / "index.json").read_text())
    by_name = {row["what"]: row for row in kept["rows"]}
    assert by_name["memory a block, as counted by the index"]["met"]
    assert kept["counts"]["blocks"] >= 100_000
    assert all(row["measured"] > 0 for row in kept["rows"])


def test_recovery_finds_every_block_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["recovery", "--quick", "--out", str(tmp_path)]) == 0
    kept = json.loads((tmp_path / "recovery.json").read_text())
    seconds = [row for row in kept["rows"] if row["unit"] == "s"]
    assert [row["what"].rpartition(", ")[2] for row in seconds] == ["from footers"] * 2 + ["from frames"] * 2
    assert all(row["measured"] > 0 for row in seconds)
    assert not list((tmp_path / "cache" / "stepwell").iterdir()), "what was written is gone"
    assert str(tmp_path) not in json.dumps(kept)


def test_a_run_that_is_streamed_comes_whole_and_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["stream", "--quick", "--out", str(tmp_path)]) == 0
    kept = json.loads((tmp_path / "stream.json").read_text())
    assert kept["counts"]["wrong"] == 0
    assert [row["measured"] for row in kept["rows"] if "blocks recalled" in row["what"]] == [1.0]
    assert all(row["measured"] > 0 for row in kept["rows"])
    for at, block in enumerate(kept["timeline"]):
        assert block["block"] == at
        (first, _), *_, (_, read) = block["read"]
        opened = block["opened"][-1][1]
        assert 0 < first < read < opened < block["heard"] < block["copied"][0] < block["copied"][1]
    assert not list((tmp_path / "cache" / "stepwell").iterdir()), "what was written is gone"


@pytest.mark.nightly
def test_windows_in_a_tier_are_simulated_with_each_policy(tmp_path: Path) -> None:
    assert main(["tails", "--quick", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "tails.json").read_text())["rows"]
    assert [row["met"] for row in rows if row["target"]] == [True, True]
