"""Measurements on a GPU where there is none: they say so, and the same code runs in a tiny shape. No timing."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lab.bench import report, storage
from lab.bench.gpu import card, copies, interference, ready, recall, run
from lab.bench.gpu.engine.compute import Marks, Work
from lab.bench.gpu.engine.halves import open_halves
from lab.bench.gpu.engine.kv import COMPACT, Kv, Layout, Shape
from lab.bench.gpu.engine.pool import PagePool, prefixes
from lab.bench.gpu.lane import Peak, Slab
from lab.bench.gpu.prefill import Prefills
from lab.bench.gpu.recalls import Recalls
from lab.bench.gpu.stage import SKIPPED, Stage
from lab.bench.longctx.gpu import run as longctx
from lab.bench.report import Result, Row, Target
from lab.rig.late_device import LateDevice
from lab.rig.well import RealWell, apart, eventually
from stepwell.demo.results.stats import Estimate
from stepwell.engines.paged.base import Mark
from stepwell.engines.paged.gpu.copies import GpuCopies
from stepwell.engines.paged.gpu.device import CopyMethod, DeviceEvent, Direction
from stepwell.engines.paged.pool import Pool, pool_of
from stepwell.engines.paged.runs import Places

ROOT = Path(__file__).resolve().parents[4]
RESULTS = ROOT / "benchmarks" / "results"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- no GPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["benchmarks/gpu.py", "scripts/test_gpu.py"])
def test_without_a_gpu_there_is_one_message_and_nothing_is_written(program: str) -> None:
    before = {path: path.read_bytes() for path in RESULTS.iterdir()}
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, program], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "[SW-714]" in line and "--device cpu" in line
    assert {path: path.read_bytes() for path in RESULTS.iterdir()} == before


def test_what_is_missing_is_named_all_at_once() -> None:
    error = ready.trouble((*ready.NEEDED, *ready.TESTS), found=lambda name: name not in ("msgspec", "yaml", "pytest"))
    assert error is not None and error.code == "SW-113"
    assert "msgspec, pyyaml, pytest" in str(error)
    assert "`pip install .`" in str(error) and "`pip install pytest`" in str(error)
    assert ready.trouble(gpu=False) is None


def test_a_python_without_our_packages_is_told_so(tmp_path: Path) -> None:
    """In a Python that has nothing but its standard library."""
    command = [sys.executable, "-I", "-S", str(ROOT / "benchmarks" / "gpu.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "torch" in line and "[SW-113]" in line


def test_what_cannot_be_asked_of_a_gpu_is_none() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert card.facts() == {"device": "cpu"}
    assert card.joules() is None


# --- the tiny shape ---------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_everything_runs_in_a_tiny_shape_and_is_kept_where_it_is_told(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    with apart():
        stage = Stage("cpu", True, time.monotonic() + 240)
        results, complete = run.run(run.NAMES, stage, out=tmp_path, disk=None, command="test")
    torch.set_num_threads(threads)
    assert complete
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"gpu-{name}.json" for name in run.NAMES)
    rows = {row.what: row for result in results for row in result.rows}
    for what in ("bytes that differ after a round trip", "bytes that differ after a recall"):
        assert rows[what].met is True
    kept = json.loads((tmp_path / "gpu-copies.json").read_text())
    assert kept["quick"] is True and kept["machine"]["gpu"] == {"device": "cpu"}
    shares = [row for row in kept["rows"] if "share_of_peak" in row]
    assert {row["layout"] for row in shares} == {layout.value for layout in COMPACT}
    assert all(row["share_of_peak"] > 0 and row["peak_gb_s"] > 0 for row in shares)
    assert rows["recompute over recall from host memory, 512 tokens"].measured is not None
    assert rows["recompute over recall from disk, 256 tokens"].measured is not None
    beside = rows["time between tokens beside both over that beside nothing, p50"].beside
    assert "recalled 0 " not in beside and "spilled 0 " not in beside.rstrip() + " "


def test_what_is_not_begun_in_time_is_skipped_and_said_to_be(tmp_path: Path) -> None:
    results, complete = run.run(run.NAMES, Stage("cpu", True, 0.0), out=None, disk=None, command="test")
    assert complete
    judged = [row for result in results for row in result.rows if row.target is not None]
    assert len(judged) > 10
    assert all(row.measured is None and row.met is None and row.beside for row in judged)
    assert SKIPPED in {row.beside for row in judged}


# --- the table --------------------------------------------------------------------------------------------------------


def test_rows_of_the_readmes_table_are_those_that_are_measured() -> None:
    results, _ = run.run(run.NAMES[:2], Stage("cpu", True, 0.0), out=None, disk=None, command="test")
    found = [{row.what: str(row.target) for row in result.rows} for result in results]
    large = Stage("cuda", False, 0.0)
    rows = [*recall._rows(large, recall.FULL, Prefills(), Recalls()), *recall._costs(Recalls())]
    found.append({row.what: str(row.target) for row in rows})
    judged = [(at, what, target) for at, rows in enumerate(found) for what, target in rows.items() if target != "None"]
    *known, hidden, ours, exact = script("results_table").GPU_ROWS
    assert known == judged
    # Of decoding across tiers the longest context is shown.
    longest = longctx.CONTEXTS["llama-8b"][-1]
    shown = [(row.what, str(row.target or "")) for name in ("stepwell", "exact")
             for row in longctx.told(name, longest, None, 1.0)]  # fmt: skip
    assert [*shown[:2], shown[3]] == [(what, target) for _, what, target in (hidden, ours, exact)]
    decoded = longctx.Decoded([0.1, 0.2], stall=0.1, waits=0.03, fetch=0.4, nbytes=30)
    told = {row.what: row for row in longctx.told("stepwell", longest, decoded, 1000.0)}
    assert told[hidden[1]].met is None, "the host does not see what the device waits for"
    assert [told[what].measured.value for _, what, _ in (hidden, ours)] == pytest.approx([0.75, 0.1])
    assert told["  share of the time that the device waited for pages"].measured.value == pytest.approx(0.1)


@pytest.mark.parametrize(("quick", "device"), [(True, "cuda"), (False, "cpu")])
def test_a_quick_run_or_one_without_a_gpu_is_shown_to_nobody(tmp_path: Path, quick: bool, device: str) -> None:
    facts: dict[str, Any] = {"gpu": {"device": device}}
    path = report.save(Result("gpu-copies", []), tmp_path, facts, command="", quick=quick)
    assert script("results_table")._kept(path) is None


def test_what_nobody_has_measured_is_called_unverified(tmp_path: Path) -> None:
    table = script("results_table")
    nothing = table.gpu(None, None, None, None)
    assert nothing.count("**unverified on GPU**") == 1 and str(len(table.GPU_ROWS)) in nothing
    _, what, _ = table.GPU_ROWS[0]
    measured = Row(what, "", Estimate(0.7, 0.6, 0.8, 7), Target(">=", 0.8))
    facts: dict[str, Any] = {"revision": "abcdef0", "gpu": {"name": "some GPU", "pcie.link.gen.current": "5"}}
    path = report.save(Result("gpu-copies", [measured], remarks=["so"]), tmp_path, facts, command="", quick=False)
    text = table.gpu(json.loads(path.read_text()), None, None, None)
    assert "| >= 0.8 | 0.700  (0.600 to 0.800) | **missed** |" in text
    assert "some GPU, PCIe 5" in text
    assert text.count("**unverified on GPU**") == len(table.GPU_ROWS) - 1


def test_further_fields_of_a_row_are_kept() -> None:
    row = Row("copies", "GB/s", Estimate(1.0, 1.0, 1.0, 1), more={"share_of_peak": 0.5})
    assert report.as_dict(Result("x", [row]))["rows"][0]["share_of_peak"] == 0.5


# --- its parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", Layout, ids=lambda layout: layout.value)
def test_layouts_differ_in_memory_and_not_in_what_they_hold(layout: Layout) -> None:
    shape = Shape(2, 5, 3, 4, 8, "float16", pad=32)
    kv, plain = (Kv.make(shape, one, "cpu") for one in (layout, Layout.LBHNC))
    plain.fill(1)
    for mine, other in zip(kv.layers, plain.layers, strict=True):
        assert mine.shape == (5, 3, 4, 8)
        mine.copy_(other)
    assert all(torch.equal(a, b) for a, b in zip(kv.words, plain.words, strict=True))
    kv.poison([1, 4])
    assert all(bool((layer[[1, 4]] == 0xA5).all()) for layer in kv.words)
    untouched = [0, 2, 3]
    assert all(torch.equal(a[untouched], b[untouched]) for a, b in zip(kv.words, plain.words, strict=True))


def test_a_changed_byte_of_what_was_marked_is_counted() -> None:
    kv = Kv.make(Shape(2, 600, 2, 4, 8), Layout.BLNHC, "cpu")
    marks, pages = Marks(kv), list(range(599, 20, -1))
    marks.forward([Work("a", (), 0, 100, pages, False), Work("a", (), 100, 4 * len(pages) - 100, pages, False)])
    assert marks.differing(pages) == 0
    kv.words[1][pages[530], 1, 2, 5] ^= 0x80
    assert marks.differing(pages) == 1
    assert marks.differing(pages[1:]) > 1000, "each place has a content of its own"


def test_pages_are_found_by_their_prefix_until_they_are_taken() -> None:
    pool, tokens = PagePool(6), list(range(40))
    hashes = prefixes(tokens, 16)
    assert len(hashes) == 2 and prefixes([*tokens[:16], 99, *tokens[17:]], 16)[0] == hashes[0]
    pages = pool.take(2)
    assert pages == [1, 2] and pool.take(4) is None and pool.free == 3
    for prefix, page in zip(hashes, pages, strict=True):
        pool.publish(prefix, page)
    pool.give_back(pages)
    assert pool.find(hashes) == pages and pool.free == 3
    assert pool.find(hashes[:1]) == pages[:1]
    pool.give_back(pages)
    assert pool.free == 4, "one of them is held once more"
    pool.give_back(pages[:1])
    assert pool.take(4) == [3, 4, 5, 2], "a prefix's tail goes before its head"
    assert pool.find(hashes) == pages[:1]


def test_a_filesystem_has_a_name(tmp_path: Path) -> None:
    assert not storage.filesystem(tmp_path).startswith("unknown")


# --- what only copies on a GPU do, over a device that is late ---------------------------------------------------------


class Idle(LateDevice):
    """Says that it gathers, and does not."""

    def enqueue(
        self, direction: Direction, way: CopyMethod, where: Places, pool: Pool, after: Sequence[Mark | DeviceEvent]
    ) -> tuple[DeviceEvent, DeviceEvent]:
        if direction is Direction.OUT and way is CopyMethod.KERNEL:
            where = Places(where.host[:0], where.pages[:0], where.memory[:0])
        return super().enqueue(direction, way, where, pool, after)


@pytest.mark.parametrize(("kind", "wrong"), [(LateDevice, False), (Idle, True)])
def test_each_way_is_measured_and_what_it_leaves_undone_is_found(
    kind: type[LateDevice], wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(caches: Mapping[str, Any], pages: int) -> GpuCopies:
        return GpuCopies(pool_of(caches, pages), kind(1, at_once=True), dict.fromkeys(Direction, CopyMethod.ENGINE))

    monkeypatch.setattr(copies, "open_copies", late)
    stage, block = Stage("cpu", True, time.monotonic() + 60), copies.Block(2, 1, 16, 1)
    slab = Slab(8 * block.nbytes)
    point = copies._point(stage, Layout.LBNHC, block, slab, Peak(stage, 4 * block.nbytes), 2)
    slab.close()
    assert set(point.ways) == {"engine", "kernel"} and point.chosen == {"gather": "engine", "scatter": "engine"}
    assert all(ours.nbytes and ours.wall_s for passes in point.passes.values() for ours, _ in passes)
    assert (point.differing > 0) == wrong


def test_a_decode_beside_which_nothing_was_copied_is_no_measurement() -> None:
    phases = {what: interference.Phase([0.01] * 20, 0.2) for what in interference.BESIDE}
    phases["recalls"].recalled = phases["both"].spilled = 1 << 20
    measured = {row.what: row.measured for row in interference._rows(phases) if row.target is not None}
    for percent in (50, 99):
        name = "time between tokens beside {} over that beside nothing, p{}"
        assert measured[name.format("recalls", percent)] is not None
        assert measured[name.format("spills", percent)] is measured[name.format("both", percent)] is None


def test_what_ends_one_measurement_leaves_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(_: Stage) -> Result:
        raise OSError("a compiler is missing")

    monkeypatch.setattr(copies, "run", fails)
    results, complete = run.run(run.NAMES[:2], Stage("cpu", True, 0.0), out=tmp_path, disk=None, command="test")
    assert not complete and [result.name for result in results] == ["gpu-interference"]


def test_an_arena_grows_before_it_is_needed_and_nothing_of_that_stays() -> None:
    with apart() as folder, RealWell(folder / "home", host="64MiB") as well:
        kv = Kv.make(Shape(2, 8, 2, 16, 32), Layout.BLHNC, "cpu")
        with open_halves(well.home, kv, block_tokens=128) as halves:
            halves.wait_ready()
            halves.grow(40 << 20)
            assert halves.mapper.mapped * (16 << 20) >= 40 << 20
            eventually(lambda: not well.held(), "nothing is held")
            assert well.count("blocks") == 0
            with pytest.raises(TimeoutError, match="the arena has slots for"):
                halves.grow(128 << 20, patience_s=0.1)
            eventually(lambda: not well.held(), "nothing is held")
