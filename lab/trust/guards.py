"""Mutation check: each guard of guards.toml is switched off in turn, and some test must fail.

    all tests of the table as they are: must pass ──► each guard off, its tests only: one must fail ──► the list

A guard is off in a process of its own, in memory (see `lab.rig.mutant`). One that no test misses has survived:
a violation, like an entry of the table that is none any more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import stepwell
from lab.rig.mutant import replaced, source_of
from lab.trust.budget import Budget
from lab.trust.report import Row

TABLE = Path(__file__).with_name("guards.toml")
_TESTS = Path(stepwell.__file__).parents[2] / "tests"
_LONGEST_S, _BATCH_S = 60.0, 900.0
_PROMISE = "guards: a test misses each one that is off"
_ENGINE = ("torch", "vllm", "vllm.config", "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
           "vllm.engine.arg_utils", "vllm.model_executor.kernels.linear", "vllm.model_executor.models.config",
           "vllm.plugins.lora_resolvers.filesystem_resolver", "vllm.plugins.lora_resolvers.hf_hub_resolver",
           "vllm.v1.attention.backends.cpu_attn", "vllm.v1.core.sched.async_scheduler", "vllm.v1.engine.core",
           "vllm.v1.executor.multiproc_executor", "vllm.v1.kv_offload.tiering.manager",
           "vllm.v1.kv_offload.tiering.spec", "vllm.v1.request", "vllm.v1.structured_output",
           "vllm.v1.worker.kv_connector_model_runner_mixin", "vllm.v1.worker.gpu.kv_connector",
           "vllm.v1.worker.utils")  # fmt: skip
"""What tests of the adapter load, for seconds."""

_BEFORE_VLLM = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # fmt: skip
"""What they set before they load it."""

Outcome = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Guard:
    """`changes`: texts that the module has once each, and those that in their places switch the guard off. `tests`:
    node ids below tests/, of which at least one must fail then. They are quick, and start no engine."""

    name: str
    module: str
    changes: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]

    def wrong(self, below: Path) -> str:
        """Why it cannot be tried with the tests that lie `below`; empty: it can."""
        try:
            text = replaced(source_of(self.module).read_text(encoding="utf-8"), self.changes)
            compile(text, self.module, "exec", dont_inherit=True)
        except (ImportError, OSError, SyntaxError, ValueError) as error:
            return f"{self.name}: {error}"
        gone = [test for test in self.tests if not _there(below, test)]
        return f"{self.name}: no test is called {gone[0]}" if gone else ""


def _there(below: Path, test: str) -> bool:
    file, _, function = test.partition("::")
    path = below / file
    kind, _, name = function.partition("[")[0].rpartition("::")  # a kit's tests have a class that inherits them
    return path.is_file() and (f"class {kind}(" if kind else f"def {name}(") in path.read_text(encoding="utf-8")


def table() -> list[Guard]:
    """In the table's order, which is that of the code from the bytes up."""
    with TABLE.open("rb") as file:
        rows = tomllib.load(file)["guard"]
    return [Guard(row["name"], row["module"], tuple(map(tuple, row["changes"])), tuple(row["tests"])) for row in rows]


def run(budget: Budget) -> Iterable[Row]:
    guards = table()
    if not _TESTS.is_dir():
        yield Row(_PROMISE, 0, 0, budget.seed, "not tried: the tests are in a clone of the repository only")
        return
    found = [wrong for guard in guards if (wrong := guard.wrong(_TESTS))]
    sound = [guard for guard in guards if not guard.wrong(_TESTS)]
    untried = 0
    for of_engine, modules in ((False, ()), (True, _ENGINE)):
        part = [guard for guard in sound if any(test.startswith("engines/") for test in guard.tests) is of_engine]
        untried += _try(part, modules, budget, found)
    remark = f"switched off one at a time, in {len({guard.module for guard in guards})} modules"
    remark += f"; {untried} were not tried: no time, or their tests cannot run here" if untried else ""
    yield Row(_PROMISE, len(guards) - untried, len(found), budget.seed, remark, found)


def _try(guards: Sequence[Guard], modules: Sequence[str], budget: Budget, found: list[str]) -> int:
    """Adds what is wrong to `found`; how many guards were not tried. Large processes fork slowly: hence `modules`."""
    untried, few = 0, budget.processes + 1
    many = few if modules else few + 2  # what is missed is often missed by waiting in vain, which takes no processor
    with _nurseries(many, modules) as ask, ThreadPoolExecutor(few) as gently, ThreadPoolExecutor(many) as pool:
        found += [text for text in gently.map(lambda tests: _as_they_are(ask(tests)), _batches(guards)) if text]
        outcomes = pool.map(lambda guard: None if budget.over else ask(guard.tests, guard), guards)
        for guard, outcome in zip(guards, outcomes, strict=True):
            if outcome is None or not (outcome["failed"] or outcome["broken"] or outcome["passed"]):
                untried += 1
                budget.tell(f"not tried: {guard.name}")
                continue
            survived = _survived(guard, outcome)
            budget.tell(survived or f"a test fails without: {guard.name}")
            found += [survived] if survived else []
    return untried


def _as_they_are(outcome: Outcome) -> str:
    """What is wrong with tests while nothing is off."""
    bad = [*outcome["failed"], *outcome["broken"]]
    return f"nothing is off, and yet: {bad[0]}" if bad else ""


def _survived(guard: Guard, outcome: Outcome) -> str:
    """What is wrong with this guard's tests, or with its entry; empty: a test has missed it."""
    if outcome["broken"]:
        return f"{guard.name}: what stands in its place is no program: {outcome['broken'][0]}"
    if not outcome["loaded"]:
        return f"{guard.name}: its tests do not load {guard.module}"
    return "" if outcome["failed"] else f"{guard.name}: no test misses it ({', '.join(guard.tests)})"


def _batches(guards: Sequence[Guard]) -> list[list[str]]:
    """Tests of all guards, once each, file by file, the files with most tests first."""
    files: dict[str, list[str]] = {}
    for test in sorted({test for guard in guards for test in guard.tests}):
        files.setdefault(test.partition("::")[0], []).append(test)
    return sorted(files.values(), key=len, reverse=True)


class Nursery:
    """One process that runs tests in forks of itself, one set at a time: one thread at a time may ask."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lab.rig.nursery", *modules],
            cwd=_TESTS.parent,
            env={
                **_BEFORE_VLLM,
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(_TESTS.parent / "src"), str(_TESTS.parent)]),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, tests: Sequence[str], guard: Guard | None = None) -> Outcome:
        """What came of these tests, node ids below tests/, with the guard off."""
        mutant = None if guard is None else {"module": guard.module, "changes": guard.changes}
        seconds = _BATCH_S if guard is None else _LONGEST_S
        request = {"tests": [f"{_TESTS}/{test}" for test in tests], "seconds": seconds, "mutant": mutant}
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            return {"loaded": False, "passed": 0, "failed": [], "broken": ["the process that runs the tests has ended"]}
        outcome: Outcome = json.loads(answer)
        return outcome

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def _nurseries(count: int, modules: Sequence[str]) -> Iterator[Callable[..., Outcome]]:
    """`Nursery.ask` of whichever of them is idle; any thread."""
    made = [Nursery(modules) for _ in range(count)]
    idle: SimpleQueue[Nursery] = SimpleQueue()
    for nursery in made:
        idle.put(nursery)

    def ask(tests: Sequence[str], guard: Guard | None = None) -> Outcome:
        nursery = idle.get()
        try:
            return nursery.ask(tests, guard)
        finally:
            idle.put(nursery)

    try:
        yield ask
    finally:
        for nursery in made:
            nursery.close()
