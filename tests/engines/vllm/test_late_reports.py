"""What workers report late, of a life or a load of a request that has ended: it says nothing of the next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("vllm")


from stepwell.client.scheduler import SchedulerClient
from stepwell.engines.common.plan import Load, Shape, StepReport
from stepwell.engines.common.requests import Loading, Tracked
from stepwell.engines.common.steps import MAX_STEPS, Computes, Steps
from stepwell.engines.vllm.scheduler.half import SchedulerHalf

TOKENS = 64


class Counting:
    """What the half tells its client here."""

    def __init__(self) -> None:
        self.counts: list[str] = []
        self.forgotten: list[bytes] = []

    def count(self, name: str, n: int = 1) -> None:
        self.counts.append(name)

    def timed(self, steps: Any, copies: Any) -> None:
        pass

    def forget(self, session: int, digests: bytes, epoch: int) -> None:
        self.forgotten.append(digests)


def half(client: Counting) -> SchedulerHalf:
    shape = Shape(page=16, block_tokens=TOKENS, shard_bytes=4096, world=1)
    return SchedulerHalf(shape, cast(SchedulerClient, client), lambda *_: None)


def tracked(scheduler: SchedulerHalf, life: int) -> Tracked:
    request: Any = SimpleNamespace(request_id="r")
    known = Tracked(request, order=1, chain=None, epoch=0, life=life)
    scheduler.live.known["r"] = known
    return known


def test_a_step_of_an_earlier_life_confirms_nothing() -> None:
    scheduler = half(Counting())
    known = tracked(scheduler, life=2)
    scheduler._steps.begin(5, [Computes("r", 1, TOKENS, TOKENS)])
    scheduler.stepped(StepReport(done={5: 1}))
    assert known.confirmed == 0
    scheduler._steps.begin(6, [Computes("r", 2, TOKENS, TOKENS)])
    scheduler.stepped(StepReport(done={6: 1}))
    assert known.confirmed == TOKENS


def test_steps_that_nobody_reports_are_forgotten() -> None:
    steps = Steps(world=2)
    for number in range(MAX_STEPS + 1):
        steps.begin(number, [Computes("r", 1, number, 1)])
    assert len(steps._under_way) == MAX_STEPS
    assert [*steps.ended({0: 2}), *steps.ended({1: 2})] == [("r", 1, 1, 1)]


@pytest.mark.parametrize(("transfer", "counts"), [(2, False), (3, True)])
def test_a_load_of_an_earlier_transfer_says_nothing(transfer: int, counts: bool) -> None:
    scheduler = half(Counting())
    known = tracked(scheduler, life=1)
    known.loading = loading = Loading(Load("r", 7, 3, []), first=0, start=0, tokens=TOKENS, good=4)
    scheduler.stepped(StepReport(failed=[("r", transfer, 1)]))
    assert (known.failed, loading.good) == ((True, 1) if counts else (False, 4))
    scheduler.stepped(StepReport(loaded=[("r", transfer, 0.5)]))
    assert loading.copy_s == (0.5 if counts else 0.0)


def test_what_was_computed_on_top_of_a_failed_load_is_no_better_for_the_next() -> None:
    """Pages behind those that failed are in the engine's cache too, and may be hit alone where it has others twice."""
    scheduler = half(Counting())
    known = tracked(scheduler, life=1)
    known.tables, known.admitted = [[1, 2, 3, 4]], True
    scheduler.not_loaded({3})
    assert known.mute
    hits = {2: False, 3: True, 4: True}
    for page, wrong in hits.items():
        known = tracked(scheduler, life=2)
        scheduler._scheduled("r", [[9, page, 10]], 32, SimpleNamespace(num_scheduled_tokens={"r": 16}), [])
        assert known.mute is wrong, page
    known = tracked(scheduler, life=3)
    scheduler._scheduled("r", [[9, 4, 10]], 16, SimpleNamespace(num_scheduled_tokens={"r": 16}), [])
    assert not known.mute, "it writes that page anew"
