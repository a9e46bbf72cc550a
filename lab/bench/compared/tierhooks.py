"""For how long each hook of the tier below vLLM's offloading keeps vLLM's scheduler thread on a processor.

The workload of `peers` with that tier alone: an engine is asked about all documents one at a time and several at a
time, so that all but the last ones are recalled from disk. Times are the thread's own CPU seconds in vLLM's own calls.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab import FOLDER
from lab.bench.compared import systems
from lab.bench.compared.peers import FULL, OUTPUT, QUICK, Workload, together
from lab.bench.compared.stand import Stand
from lab.bench.compared.systems import TIER, System
from lab.bench.compared.timed_tier import HOOKS, TimedTier
from lab.bench.report import Result, Row, Target
from stepwell.demo import documents as library
from stepwell.demo import model as models
from stepwell.demo.folder import demo_folder
from stepwell.demo.progress import progress as suitable_progress
from stepwell.demo.results import stats

BOUND_US = 200.0


def run(quick: bool) -> Result:
    """Raises ConfigError, EngineFailed, TimeoutError, with nothing left running."""
    systems.check([TIER])
    size, progress = QUICK if quick else FULL, suitable_progress()
    model = models.prepare(None, progress)
    encode, kv_token = library.load_encoder(model), models.kv_bytes_per_token(models.read_config(model))
    assert kv_token is not None, "the default model says it"
    rows: list[Row] = []
    calls = 0
    for page in size.pages:
        work = Workload(model, library.choose(encode, size.documents, page), page, size.together, kv_token)
        with demo_folder(models.cache_folder()) as folder, progress.waiting(f"page {page}: an engine with the tier"):
            seconds = _asked(work, size.repetitions, folder)
        calls += sum(map(len, seconds.values()))
        rows += _rows(seconds, page)
    remarks = ["measured: the 99th percentile of the thread's CPU time; a lookup is one chunk's, of many in a step"]
    return Result("tierhooks", rows, {"calls": calls, "documents": size.documents}, remarks)


def _asked(work: Workload, repetitions: int, folder: Path) -> Mapping[str, list[float]]:
    """CPU seconds of every call, by hook."""
    times = folder / "times.json"
    system = _timed(systems.system(TIER, folder, work.memory()), times)
    with contextlib.closing(Stand(system, work.model, work.shape(TIER), folder / "engine.log")) as stand:
        for _ in range(repetitions + 1):
            for document in work.documents:
                stand.ask(document.prompt, OUTPUT)
            together(stand, work)
            stand.settle()
    found: dict[str, list[float]] = json.loads(times.read_text(encoding="utf-8"))
    return found


def _timed(system: System, times: Path) -> System:
    connector: Any = copy.deepcopy(system.connector)
    (tier,) = connector["kv_connector_extra_config"]["secondary_tiers"]
    tier |= {"type": TimedTier.__name__, "module_path": TimedTier.__module__, "times": str(times)}
    path = os.pathsep.join([str(FOLDER.parent), system.env["PYTHONPATH"]])
    return replace(system, connector=connector, env={**system.env, "PYTHONPATH": path})


def _rows(seconds: Mapping[str, Sequence[float]], page: int) -> list[Row]:
    rows = []
    for hook in HOOKS:
        calls = seconds.get(hook, ())
        if not calls:
            rows.append(Row(f"{hook}, page {page}", "us", None, beside="never called"))
            continue
        p99, half = stats.percentile(calls, 99).times(1e6), stats.median(calls).times(1e6)
        beside = f"p50 {half.value:.1f}, longest {1e6 * max(calls):.0f}, of {len(calls)} calls"
        rows.append(Row(f"{hook}, page {page}", "us", p99, Target("<=", BOUND_US), beside))
    return rows
