"""Whatever statement of a hook raises, once: each request ends right, and nothing is left of it.

A tracer finds the statements that a scenario comes by, hook by hook, and then makes one after the other raise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="needs the engine")

from stepwell.client import streams as client_streams
from stepwell.client import worker as client_worker
from stepwell.engines.common import canaries, loads, requests, steps, tasks, worker_half
from stepwell.engines.common.plan import StepPlan
from stepwell.engines.paged import lane
from stepwell.engines.paged.gpu import copies as gpu_copies
from stepwell.engines.vllm import connector
from stepwell.engines.vllm.hooks import guarded
from stepwell.engines.vllm.scheduler import half, live, recalls, spills

from .local import Engine, engine, late, prompt
from .raising import Statement, codes_of, drawn, in_parts, raising, statements
from .slow import SlowEngine
from .test_faults import lose, rejoin
from .test_streams import BLOCK_S, streaming, under_way
from .test_streams import prompt as blocks

WORKER = [worker_half, loads, tasks, lane, client_worker, client_streams, gpu_copies]
SCHEDULER = [half, live, recalls, spills, canaries, requests, steps]

NOT_GUARDED = ["for _ in range(2 if again else 1):", "try:", "pass"]
"""Of the connector's hooks: where each begins, before anything is done."""

COST_A_LEASE = ["reserve", "_reserve_tail", "_save", "ready"]
"""Functions of the scheduler's half that have a lease in hand. One that is lost there is neither filled nor given up,
and keeps its slot until the session ends. Were it given up, a worker might fill the slot when it is another block's."""

OF_WORKERS = [
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "_taken_received",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
]
OF_SCHEDULERS = [
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "has_pending_push_work",
]

Scene = Callable[[], None]


class Stage:
    """An engine that goes through the same scenes again and again, each time with other tokens."""

    def __init__(self, folder: Path, *, overlapping: bool) -> None:
        self._folder = folder
        self._overlapping = overlapping
        self._seeds = count(1)
        self._engines = count(1)
        self._stack = ExitStack()
        self._h: Engine | None = None
        self._now = 0.0
        self._tokens: list[int] = []
        self._asked: list[str] = []
        self.scenes = [self.spill, self.recall, self.fail, self.canary, self.abort]

    @property
    def h(self) -> Engine:
        if self._h is None:
            self._stack.enter_context(late(None) if self._overlapping else nullcontext())
            folder = self._folder / str(next(self._engines))
            self._h = self._stack.enter_context(
                engine(folder, host="64MiB", extra={"canary": 100}, batch_tokens=64, num_pages=33, max_seqs=4)
            )
            self._h.half.live.clock = lambda: self._now
        return self._h

    def close(self) -> None:
        stack, self._stack, self._h = self._stack, ExitStack(), None
        stack.close()

    def prepare(self, scene: Scene) -> None:
        """What a scene needs in the well, and nowhere else; in a new engine where the last one serves nothing more."""
        if not self.h.half.live.trusted:
            self.close()
        self._tokens = prompt(70, next(self._seeds))
        self._asked = []
        self.h.half._canaries._prefixes = 0
        if scene != self.spill:
            self._run(self._add(self._tokens))
            self.h.forget()

    def spill(self) -> None:
        self._run(self._add(self._tokens))

    def recall(self) -> None:
        self._run(self._add(self._tokens, max_tokens=2))

    def fail(self) -> None:
        """A slot changes, and the request is preempted later."""
        h = self.h
        with h.spoiled(len(h.entries()) - 2):
            failing = self._add([*self._tokens, *self._tokens[:30]], max_tokens=8)
            self._run(failing, until=lambda: len(h.requests[failing].tokens) >= 3)
            if h.status(failing) == "RUNNING":
                h.preempt(failing)
                h.pool.reset_prefix_cache()
            self._run(failing)

    def canary(self) -> None:
        self.h.half._canaries._prefixes = 99
        self._run(self._add(self._tokens, max_tokens=2))

    def abort(self) -> None:
        """While it is loaded."""
        parked = self._add(self._tokens)
        self._step()
        if self.h.requests[parked].finish_reason is None:
            self.h.abort(parked)
        self._run()

    def _add(self, tokens: list[int], **more: Any) -> str:
        self._asked.append(self.h.add(tokens, **more))
        return self._asked[-1]

    def _step(self) -> None:
        self.h.step()
        self._now += 0.03

    def _run(self, *rids: str, until: Callable[[], bool] = lambda: False) -> None:
        """Until these have ended and nothing is left to do; copies end when nothing else goes on."""
        h = self.h
        for at in range(60):
            if until() or (all(h.requests[rid].finish_reason is not None for rid in rids) and not h.busy()):
                break
            self._step()
            if self._overlapping and at % 3 == 2:
                h.settle()

    def judge(self, at: Statement | None = None) -> None:
        h = self.h
        for _ in range(2):
            self._step()
            h.settle()
        _judge(h, self._asked, at)


def _judge(h: Any, asked: list[str], at: Statement | None) -> None:
    """All that was asked has its right answer, and nothing is held any more."""
    for rid in asked:
        outcome = h.requests[rid]
        assert outcome.finish_reason is not None, f"{rid} is {h.status(rid)}"
        assert h.right(outcome, outcome.finish_reason)
    if at is not None and at.calls[-1] in COST_A_LEASE:
        lose(h)
        rejoin(h)
    h.assert_quiet()


class StreamStage:
    """The same over a tier, from which all is recalled as a stream."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seeds = count(1)
        self._engines = count(1)
        self._opened: AbstractContextManager[SlowEngine] | None = None
        self._tokens: list[int] = []
        self._asked: list[str] = []
        self.scenes = [self.whole, self.short, self.abort, self.lost]

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            self.h.half._recalls._streams.clear()  # those whose reports were lost, up to MAX_STREAMS
            self.h.client._streams.clear()
            opened.__exit__(None, None, None)

    def prepare(self, scene: Scene) -> None:
        if self._opened is None or not self.h.half.live.trusted:
            self.close()
            self._opened = streaming(self._folder / str(next(self._engines)), blocks(4, seed=0))
            self.h = self._opened.__enter__()
            self.h.threads, self.h.idle_s = False, BLOCK_S
        self._tokens, self._asked, self.h.tier.hung = blocks(4, next(self._seeds)), [], False
        self.h.tier.block_s = 0.0
        self.h.put_below([self._tokens])
        self.h.tier.block_s = BLOCK_S

    def _begin(self) -> str:
        """Some of it is in its pages."""
        self._asked.append(rid := self.h.add(self._tokens, max_tokens=2))
        for _ in range(20):
            if self.h.requests[rid].finish_reason or any(task.good for task in under_way(self.h)):
                break
            self.h.step()
        return rid

    def whole(self) -> None:
        self._begin()
        self._run()

    def short(self) -> None:
        self._begin()
        self.h.tier.hung = True
        self._run()

    def abort(self) -> None:
        if self.h.requests[rid := self._begin()].finish_reason is None:
            self.h.abort(rid)
        self._run()

    def lost(self) -> None:
        self._begin()
        lose(self.h)
        self._run()
        rejoin(self.h)

    def _run(self) -> None:
        for _ in range(100):
            if not self.h.busy():
                break
            self.h.step()

    def judge(self, at: Statement | None = None) -> None:
        h = self.h
        self._run()
        h.tier.hung = False
        h.rest()
        _judge(h, self._asked, at)


def hooks(names: list[str]) -> list[Any]:
    """The code of these hooks, and of what guards them."""
    found = codes_of(connector) + codes_of(guarded)
    return [code for code in found if code.co_name in {*names, "open_hook"}]


def source(statement: Statement) -> str:
    return Path(statement.file).read_text().splitlines()[statement.line - 1].strip()


def each_raises(stage: Stage | StreamStage, modules: list[ModuleType], names: list[str], percent: int) -> None:
    codes = [code for module in modules for code in codes_of(module)] + hooks(names)
    codes = [code for code in codes if not code.co_name.startswith("__")]
    tried: set[tuple[str, int, str]] = set()
    wrong: list[str] = []
    for scene in stage.scenes:
        stage.prepare(scene)
        found = statements(codes, scene)
        stage.judge()
        for at in found:
            inside = [name for name in at.calls if name in names]
            key = at.file, at.line, inside[0] if inside else at.calls[0]
            begins = at.calls[-1] in {*names, "open_hook"} and source(at) in NOT_GUARDED
            if key in tried or begins or at.calls[0] not in {*names, "open_hook"}:
                continue
            tried.add(key)
            if not drawn(percent):
                continue
            try:
                stage.prepare(scene)
                assert raising(codes, at, scene), "it was not reached"
                stage.judge(at)
            except Exception as error:  # noqa: BLE001 - what is wrong with it is said below
                wrong.append(f"{at} in {scene.__name__}: {source(at)}: {type(error).__name__}: {str(error)[:200]}")
                with suppress(Exception):
                    stage.close()
    assert len(tried) > 200
    assert not wrong, "\n".join(wrong)


@in_parts
@pytest.mark.parametrize("overlapping", [False, True], ids=["inline", "overlapping"])
def test_every_statement_of_the_workers_hooks_may_raise(tmp_path: Path, overlapping: bool, percent: int) -> None:
    stage = Stage(tmp_path, overlapping=overlapping)
    try:
        each_raises(stage, WORKER, OF_WORKERS, percent)
    finally:
        stage.close()


@in_parts
def test_every_statement_of_the_schedulers_hooks_may_raise(tmp_path: Path, percent: int) -> None:
    stage = Stage(tmp_path, overlapping=False)
    try:
        each_raises(stage, SCHEDULER, OF_SCHEDULERS, percent)
    finally:
        stage.close()


@in_parts
@pytest.mark.parametrize("side", ["workers", "scheduler"])
def test_every_statement_may_raise_while_a_stream_is_under_way(tmp_path: Path, side: str, percent: int) -> None:
    stage = StreamStage(tmp_path)
    try:
        each_raises(
            stage, *((WORKER, OF_WORKERS) if side == "workers" else (SCHEDULER, OF_SCHEDULERS)), percent=percent
        )
    finally:
        stage.close()


@pytest.mark.parametrize("late_by", [1, 3])
@pytest.mark.parametrize("take", ["take_received", "take_bad_pages", "take_report"])
@pytest.mark.parametrize("spoilt", [True, False])
def test_what_is_told_may_be_some_steps_late(tmp_path: Path, take: str, late_by: int, spoilt: bool) -> None:
    """A hook that raises again and again while there is something to tell: bad pages are never taken for good ones."""
    with engine(tmp_path) as h:
        h.serve(prompt(200))
        h.forget()
        work = h.workers[0].connector._work
        real, raised = getattr(work, take), [0]

        def raising_at_first() -> Any:
            if raised[0] < late_by and (raised[0] or any(step.loads for step in work._steps)):
                raised[0] += 1
                raise RuntimeError("on purpose")
            return real()

        with patch.object(work, take, raising_at_first), h.spoiled(5) if spoilt else nullcontext():
            seen = h.serve(prompt(200), max_tokens=3)
        assert raised[0] == late_by
        assert h.right(seen) and bool(h.failures) is spoilt
        h.assert_quiet()


@pytest.mark.parametrize("times", [4, 5, 9])
def test_a_plan_that_no_hook_of_its_step_could_take_is_answered_later(tmp_path: Path, times: int) -> None:
    with engine(tmp_path) as h:
        h.serve(prompt(200))
        h.forget()
        real, raised = tasks.Step.of, [0]

        def raising_at_first(plan: StepPlan) -> tasks.Step:
            if plan.loads and raised[0] < times:
                raised[0] += 1
                raise MemoryError("on purpose")
            return real(plan)

        with patch.object(tasks.Step, "of", raising_at_first):
            seen = h.serve(prompt(200), max_tokens=3)
        assert raised[0] == times
        assert h.right(seen)
        h.assert_quiet()


@pytest.mark.parametrize("steps", [1, 3])
def test_a_plan_that_raises_twice_comes_with_the_next_step(tmp_path: Path, steps: int) -> None:
    with engine(tmp_path, batch_tokens=64, num_pages=33) as h:
        h.serve(prompt(200))
        h.forget()
        running = h.add(prompt(150, seed=4), max_tokens=40)
        h.step()
        loaded = h.add(prompt(200), max_tokens=3)
        real, raised = h.half._taken, [0]

        def raising_at_first() -> StepPlan:
            if raised[0] < 2 * steps and (raised[0] or h.half._plan.now.loads):
                raised[0] += 1
                raise MemoryError("on purpose")
            return real()

        with patch.object(h.half, "_taken", raising_at_first):
            h.run()
        assert raised[0] == 2 * steps
        assert h.right(h.requests[running]) and h.right(h.requests[loaded])
        assert h.right(h.recall([*prompt(150, seed=4), *h.requests[running].tokens], max_tokens=3))
        assert h.right(h.recall(prompt(200), max_tokens=3))
        lose(h)
        rejoin(h)
        h.assert_quiet()


def test_a_plan_that_comes_late_copies_nothing_out_of_pages(tmp_path: Path) -> None:
    """They may be another block's by then."""
    with engine(tmp_path, batch_tokens=64) as h:
        rid = h.add(prompt(300), max_tokens=8)
        real, late, copied = h.half._taken, [], []

        def raising_at_first() -> StepPlan:
            if len(late) < 2 and h.half._plan.now.saves:
                late.append({save.lease for save in h.half._plan.now.saves})
                raise MemoryError("on purpose")
            plan = real()
            copied.extend(save.lease for save in plan.saves)
            return plan

        with patch.object(h.half, "_taken", raising_at_first):
            h.run()
        assert len(late) == 2 and late[0].isdisjoint(copied)
        assert h.right(h.requests[rid])
        assert h.right(h.recall(prompt(300), max_tokens=3))


def test_what_was_copied_out_while_no_page_was_held_back_is_not_stored(tmp_path: Path) -> None:
    with late(None), engine(tmp_path, num_pages=25) as h:
        h.serve(prompt(200))
        h.forget()
        copies = h.workers[0].connector._work._copies
        with patch.object(copies, "hold_back", side_effect=RuntimeError("on purpose")):
            h.serve(prompt(300, seed=2))
        h.settle()
        h.forget()
        for tokens in (prompt(200), prompt(300, seed=2)):
            assert h.right(h.serve(tokens, max_tokens=3))
        assert not h.violations
        h.settle()
        h.assert_quiet()
