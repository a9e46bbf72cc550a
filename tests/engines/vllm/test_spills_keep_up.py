"""Spilling keeps up with computing, whatever a step computes, and costs no request its pages or its turn."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs the engine")

from stepwell.engines.common.plan import Save, StepPlan
from stepwell.engines.vllm.scheduler.spills import LINGER_S

from .local import Engine, engine, prompt

STEP_S = 0.02
STEP_BLOCKS = 16


@pytest.fixture(autouse=True)
def one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step may copy in any case is a sixteenth of what it computes at most: as of a model of 8 B parameters, a
    step of 8,192 tokens of which is 1 GiB of KV."""
    monkeypatch.setattr("stepwell.engines.common.steps.MIN_BYTES", 1)


class Watched:
    """Steps of 20 ms. `longest`: that a request lingered; `most`: blocks that a step copied; `saved`: those
    beside it."""

    def __init__(self, h: Engine) -> None:
        self.h = h
        self.now = 0.0
        self.longest = 0.0
        self.most = 0
        self.saved: list[Save] = []
        h.half.live.clock = lambda: self.now
        made = h.half.plan

        def plan(out: object) -> StepPlan:
            plan = made(out)
            self.saved += plan.saves
            self.most = max(self.most, len(plan.urgent) + len(plan.saves))
            return plan

        h.half.plan = plan  # type: ignore[method-assign]

    def step(self) -> None:
        self.h.step()
        self.now += STEP_S
        waited = [self.now - tracked.ended_at for tracked in self.h.half.live.lingering.values()]
        self.longest = max([self.longest, *waited])

    def run(self) -> None:
        while self.h.busy():
            self.step()


def test_every_block_is_spilled_and_no_decode_is_preempted(tmp_path: Path) -> None:
    with engine(tmp_path, host="64MiB", num_pages=129, batch_tokens=16 * STEP_BLOCKS, max_seqs=8) as h:
        watched = Watched(h)
        decodes = [h.add(prompt(64, seed=900 + n), max_tokens=150) for n in range(3)]
        prompts: list[str] = []
        while len(prompts) < 20:
            if len(h.scheduler.waiting) < 2:
                prompts.append(h.add(prompt(256, seed=len(prompts))))
            watched.step()
        watched.run()
        assert all(h.right(h.requests[rid]) for rid in prompts)
        assert [h.requests[rid].preemptions for rid in decodes] == [0, 0, 0]
        assert h.stat("spilled_blocks") == 20 * 16 + 3 * (64 + 149) // 16
        assert watched.longest <= LINGER_S + STEP_S and watched.most <= 2 * STEP_BLOCKS + 1
        h.assert_quiet()


def forgotten_by_the_well(h: Engine) -> None:
    """The engine has blocks in its own cache that are to be spilled again: nothing is computed for them."""
    h.well.hierarchy.operator.clear(frozenset({"host"}), b"", lambda cleared: None)
    h.well.pump()


def test_what_ended_is_copied_first_and_waits_no_longer_than_its_limit(tmp_path: Path) -> None:
    """Its pages may be taken at any time."""
    with engine(tmp_path, host="64MiB", num_pages=129, max_seqs=8) as h:
        watched = Watched(h)
        for n in range(2):
            h.add(prompt(160, seed=n))
        watched.run()
        forgotten_by_the_well(h)
        goes_on = h.add(prompt(160, seed=0), max_tokens=20)
        watched.step()
        ends = h.add(prompt(160, seed=1))
        while h.requests[ends].finish_reason is None:
            watched.step()
        pages = set(h.half.live.lingering[ends].tables[0])
        while ends in h.half.live.lingering:
            watched.saved.clear()
            watched.step()
            assert {page for save in watched.saved for page in save.pages} <= pages
        assert watched.longest == pytest.approx(LINGER_S + STEP_S)
        watched.run()
        assert h.right(h.requests[goes_on]) and h.right(h.requests[ends])
        h.assert_quiet()


def test_what_is_copied_before_a_forward_is_bounded_too(tmp_path: Path) -> None:
    """The forward waits for it. What is beyond that is given up, and may be spilled when it is computed again."""
    with engine(tmp_path, host="64MiB", num_pages=33, batch_tokens=512, max_seqs=4) as h:
        watched = Watched(h)
        h.add(prompt(320))
        watched.run()
        forgotten_by_the_well(h)
        ends = h.add(prompt(320))
        while h.requests[ends].finish_reason is None:
            watched.step()
        assert sum(pending.spill.blocks - pending.next for pending in h.half.live.lingering[ends].pending) > 10
        watched.most = 0
        other = h.add(prompt(480, seed=2), max_tokens=2)
        while h.half.live.lingering:
            watched.step()
        assert h.status(other) == "RUNNING" and watched.longest <= LINGER_S, "its pages were taken"
        assert watched.most <= 2
        watched.run()
        assert h.right(h.requests[other])
        h.assert_quiet()
