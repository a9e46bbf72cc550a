"""Whatever statement raises, once, while the engine changes its weights or hears that it has slept: nothing of before
is recalled or stored as if it were of after.

The other hooks are in test_hooks_that_raise.py, whose tracer this uses.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs the engine")

from stepwell.engines.common import canaries, loads, worker_half
from stepwell.engines.vllm.connector import StepwellConnector
from stepwell.engines.vllm.scheduler import half, live, recalls, spills

from .local import Engine, engine, prompt
from .raising import Statement, codes_of, drawn, in_parts, raising, statements
from .test_hooks_that_raise import NOT_GUARDED, OF_SCHEDULERS, OF_WORKERS, hooks, source
from .test_sleep import sleep, wake_up

HERE = ["reset_cache", "unregister_kv_caches", "restore_kv_caches"]

ELSEWHERE = {
    "get_external_cache_hit_sources": "a count: what is wrong in it is a number in a metric",
    "get_kv_connector_stats": "counts",
    "shutdown": "nothing relies on it",
}

LONG, SHORT, MORE = prompt(200), prompt(90, seed=3), prompt(150, seed=9)

Change = Callable[[Engine], None]


def test_each_hook_that_is_guarded_is_made_to_raise() -> None:
    guarded = {
        name
        for name, hook in vars(StepwellConnector).items()
        if getattr(hook, "__code__", None) is not None and hook.__code__.co_name == "open_hook"
    }
    tried = {*OF_WORKERS, *OF_SCHEDULERS, *HERE, *ELSEWHERE, "request_finished_all_groups"}
    assert guarded <= tried, f"no scene makes {guarded - tried} raise"


def new_weights(h: Engine) -> None:
    h.update_weights(7)


def slept(h: Engine) -> None:
    assert h.reset_prefix_cache(preempt=True, connector=False)
    sleep(h)
    wake_up(h)
    h.step()
    h.step()


def life(folder: Path, change: Change, at: Statement | None, found: list[Statement]) -> None:
    """An engine in which one request runs and one has ended, whose slots are granted after the change. Then an engine
    of the first weights asks for all that there was."""
    with engine(folder, batch_tokens=256, num_pages=61, max_seqs=4) as h:
        running = h.add(LONG, max_tokens=16)
        for _ in range(4):
            h.step()
        granted, late = h.client._granted, []
        h.client._granted = late.append
        short = h.add(SHORT)
        h.run_until(lambda: h.requests[short].finish_reason is not None)
        assert h.half.live.lingering
        if at is None:
            found += statements(CODES, lambda: change(h))
        else:
            assert raising(CODES, at, lambda: change(h)), "it was not reached"
        for message in late:
            granted(message)
        h.client._granted = granted
        h.run()
        h.serve(MORE, max_tokens=2)
        h.restart_engine(weights=0)
        for tokens in ([*LONG, *h.requests[running].tokens], SHORT, MORE):
            h.serve(tokens, max_tokens=2)
        assert not h.violations, h.violations[:2]


MODULES = (half, live, recalls, spills, canaries, loads, worker_half)
CODES = [code for module in MODULES for code in codes_of(module)] + hooks([*HERE, "update_connector_output"])


@in_parts
@pytest.mark.parametrize(
    ("change", "inside"),
    [(new_weights, {"reset"}), (slept, {"sleep", "wake_up", "slept", "stepped"})],
    ids=["new weights", "sleep"],
)
def test_nothing_of_before_meets_what_is_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, inside: set[str], percent: int
) -> None:
    monkeypatch.setattr(spills, "LINGER_S", 5.0)  # the change comes before it is over, on a busy machine too
    found: list[Statement] = []
    life(tmp_path / "as it is", change, None, found)
    tried: set[tuple[str, int]] = set()
    wrong: list[str] = []
    for at in found:
        of_hook = at.calls[-1] in {*HERE, "open_hook"} and source(at) not in NOT_GUARDED
        if at[:2] in tried or not (of_hook or inside & set(at.calls)):
            continue
        tried.add(at[:2])
        if not drawn(percent):
            continue
        try:
            life(tmp_path / str(len(tried)), change, at, [])
        except AssertionError as error:
            wrong.append(f"{at}: {source(at)}: {str(error)[:200]}")
    assert len(tried) > 20
    assert not wrong, "\n".join(wrong)


def test_an_engine_that_is_driven_by_a_handler_spills_all_the_same(tmp_path: Path) -> None:
    """In the process of its user an exception may be under way in every step, of another matter."""
    with engine(tmp_path) as h:
        try:
            raise ValueError("a request failed, and is tried again")
        except ValueError:
            h.serve(LONG, max_tokens=3)
            assert h.recall(LONG, max_tokens=3).external == 192
        h.assert_quiet()


@pytest.mark.parametrize("twice", [False, True])
def test_a_reset_that_does_not_end_leaves_nothing_to_recall(tmp_path: Path, twice: bool) -> None:
    with engine(tmp_path) as h:
        h.serve(LONG)
        real, left = h.half._canaries.reset, [2 if twice else 1]

        def raises() -> None:
            left[0] -= 1
            if left[0] >= 0:
                raise RuntimeError("on purpose")
            real()

        h.half._canaries.reset = raises
        h.update_weights(7)
        after = [h.serve(LONG, max_tokens=2).external, h.recall(LONG, max_tokens=2).external]
        assert after == ([0, 0] if twice else [0, 192])
        h.update_weights(0)
        assert [h.serve(LONG).external, h.recall(LONG).external] == [0, 192], "until one ends well"
        assert not h.violations
        h.assert_quiet()
