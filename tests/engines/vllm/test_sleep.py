"""What vLLM 0.33 and later do to a worker half when the engine sleeps: `unregister_kv_caches`, the memory of the pages
goes, `restore_kv_caches`. There is no such vLLM for CPUs yet, so these calls are made directly."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="needs the engine")

from stepwell.engines.common.requests import Loading
from stepwell.engines.paged.cpu import CpuCopies
from stepwell.engines.vllm.connector import StepwellConnector

from .local import Engine, engine, late, prompt
from .oracle import POISON


def sleep(h: Engine) -> None:
    """All ranks; twice, as a discard that is followed by a sleep."""
    for worker in h.workers:
        worker.connector.unregister_kv_caches()
        worker.connector.unregister_kv_caches()
        for layer in worker.words:
            layer[:] = POISON


def wake_up(h: Engine) -> None:
    for worker in h.workers:
        worker.connector.restore_kv_caches()
        worker.connector.restore_kv_caches()


def copied(h: Engine) -> list[str]:
    """What is done with pages from now on, by any rank."""
    calls: list[str] = []
    for worker in h.workers:
        copies = worker.connector._work._copies
        for name in ("gather", "scatter", "fetch"):
            setattr(copies, name, _noted(calls, name, getattr(copies, name)))
    return calls


def _noted(calls: list[str], name: str, call: Any) -> Any:
    def noted(*args: Any) -> Any:
        calls.append(name)
        return call(*args)

    return noted


def test_it_says_that_it_can() -> None:
    assert StepwellConnector.supports_sleep_mode(None) is True


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_that_slept_recalls_what_it_may(tmp_path: Path, ranks: int) -> None:
    """As vLLM does it, with a reset of the connector: nothing of before; without one: what was in the well."""
    with engine(tmp_path, ranks=ranks) as h:
        h.serve(prompt(200))
        for connector, external in ((False, 192), (True, 0), (False, 192)):
            assert h.reset_prefix_cache(preempt=True, connector=connector)
            sleep(h)
            wake_up(h)
            again = h.serve(prompt(200), max_tokens=3)
            assert (h.right(again), again.external) == (True, external)
        assert h.recall(prompt(200)).external == 192
        h.assert_quiet()


@pytest.mark.parametrize("order", [{}, {"async_scheduling": True}, {"runner_v2": True}], ids=str)
@pytest.mark.parametrize("connector", [False, True])
def test_nothing_of_before_is_saved_afterwards(tmp_path: Path, connector: bool, order: dict[str, Any]) -> None:
    """Neither of a request that has ended, nor of one that goes on, whenever its slots are granted."""
    with engine(tmp_path, **order) as h:
        granted, late = h.client._granted, []
        running = h.add(prompt(100, seed=2), max_tokens=60)
        h.run_until(lambda: len(h.requests[running].tokens) > 20)
        h.client._granted = late.append
        ended = h.add(prompt(200))
        h.run_until(lambda: h.requests[ended].finish_reason is not None)
        while h._in_flight:
            h._process(*h._in_flight.popleft())
        assert ended in h.half.live.lingering
        assert h.reset_prefix_cache(preempt=True, connector=connector)
        sleep(h)
        wake_up(h)
        h.client._granted = granted
        h.step()
        for message in late:
            granted(message)
        h.run()
        assert h.right(h.requests[running])
        h.forget()
        assert h.recall(prompt(200), max_tokens=3).external == 0
        assert h.recall([*prompt(100, seed=2), *h.requests[running].tokens], max_tokens=3).external > 0
        h.assert_quiet()


def test_what_is_planned_right_after_it_is_not_saved(tmp_path: Path) -> None:
    """The first plan is made before the scheduler can know."""
    with engine(tmp_path) as h:
        ended = h.add(prompt(200))
        h.run_until(lambda: h.requests[ended].finish_reason is not None)
        assert h.reset_prefix_cache()
        sleep(h)
        wake_up(h)
        calls = copied(h)
        h.run()
        assert calls == []
        assert h.recall(prompt(200)).external == 0
        assert h.recall(prompt(200)).external == 192
        h.assert_quiet()


def test_nothing_is_copied_while_it_sleeps(tmp_path: Path) -> None:
    """A recall that comes all the same is a failed load, which the engine computes."""
    with engine(tmp_path) as h:
        h.serve(prompt(200))
        h.forget()
        sleep(h)
        calls = copied(h)
        assert h.right(h.serve(prompt(200), max_tokens=30))
        assert calls == []
        wake_up(h)
        h.assert_quiet()
        h.serve(prompt(300, seed=2))
        assert h.recall(prompt(300, seed=2)).external == 288
        h.assert_quiet()


def test_it_does_not_fall_asleep_before_a_copy_has_ended(tmp_path: Path) -> None:
    with engine(tmp_path) as h, patch.object(CpuCopies, "inline_bytes", 0):
        h.serve(prompt(200))
        h.forget()
        begun, go, asleep = threading.Event(), threading.Event(), threading.Event()
        copies = h.workers[0].connector._work._copies
        scatter = copies.scatter

        def slow(*args: Any) -> Any:
            begun.set()
            assert go.wait(30)
            return scatter(*args)

        copies.scatter = slow
        rid = h.add(prompt(200), max_tokens=3)
        h.run_until(begun.is_set)

        def fall_asleep() -> None:
            h.workers[0].connector.unregister_kv_caches()
            asleep.set()

        thread = threading.Thread(target=fall_asleep)
        thread.start()
        assert not asleep.wait(0.1), "its pages are being written"
        go.set()
        thread.join(30)
        assert asleep.is_set()
        wake_up(h)
        h.run()
        assert h.right(h.requests[rid])
        h.assert_quiet()


def test_copies_that_a_device_has_not_done_yet_are_waited_for(tmp_path: Path) -> None:
    with late(None), engine(tmp_path) as h:
        device = h.workers[0].connector._work._copies.device
        h.serve(prompt(200))
        assert device.copied_bytes == 0
        h.workers[0].connector.unregister_kv_caches()
        assert device.copied_bytes == h.stat("spilled_bytes") > 0
        wake_up(h)
        h.assert_quiet()


def test_after_the_end_it_falls_asleep_at_once(tmp_path: Path) -> None:
    with engine(tmp_path) as h:
        h.close()
        for worker in h.workers:
            worker.connector.unregister_kv_caches()


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        (40, {"host": 8, "disk": 16, "far": 16}),
        (24, {"host": 8, "disk": 16}),
        (16, {"host": 8, "disk": 8}),
        (8, {"host": 8}),
    ],
)
def test_tokens_of_a_tier_are_those_of_its_blocks(tokens: int, found: dict[str, int]) -> None:
    """A recall of blocks 3 to 5, of 16 tokens each, that begins in the middle of the first; two were promoted."""
    loading = Loading(None, 3, 56, 40, 3, sources=bytes([0, 1, 2]))  # type: ignore[arg-type]
    assert loading.by_tier(tokens, lambda blocks: 16 * blocks, ("host", "disk", "far")) == found
    assert loading.by_tier(40, lambda blocks: 16 * blocks, ("host",)) == {"host": 40}, "a tier without a name"
