"""Models of several cache groups with our tier below vLLM's offloading: layers with sliding windows need the end of a
prompt only, and vLLM looks for that from the end, when it knows how far the others reach."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm.v1.kv_offload.tiering.manager", reason="this vLLM has no secondary tiers")

from stepwell.engines.vllm.offloading.lookups import HELD_S, MAX_PROMOTED, MAX_ROUNDS, MAX_SEARCHES, WINDOW_ENDS

from .harness import Harness
from .local import open_well, prompt
from .test_tier import engine, external, settle

POOL = {"num_pages": 257, "max_model_len": 1024}


def served(harness: Harness, prompts: list[list[int]]) -> None:
    """Each has gone through vLLM's host memory, which the last ones fill."""
    for tokens in prompts:
        harness.serve(tokens)
        settle(harness)


def groups(harness: Harness) -> int:
    return len(harness.scheduler.kv_cache_config.kv_cache_groups)


@pytest.mark.parametrize(
    "windows", [(0, 64), (0, 16), (0, 18), (0, 100), (0, 64, 64), (0, 32, 64), (0, 0, 64), (64,), (32, 64)], ids=str
)
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_what_the_cpu_tier_has_evicted_is_recalled(
    tmp_path: Path, windows: tuple[int, ...], blocks_per_chunk: int
) -> None:
    layers = max(2, len(windows))
    prompts = [prompt(401, seed) for seed in range(5)]
    chunk = 16 * blocks_per_chunk
    fields: dict[str, Any] = {"windows": windows, "layers": layers, "extra": {"blocks_per_chunk": blocks_per_chunk}}
    rows = 40 * layers // blocks_per_chunk
    with open_well() as well, engine(tmp_path, well, rows=rows, **fields, **POOL) as h:
        assert groups(h) == len(windows)
        served(h, prompts)
        assert [external(h, tokens) for tokens in prompts] == [400 // chunk * chunk] * 5
        well.check()


def test_an_engine_that_starts_again_finds_what_it_had(tmp_path: Path) -> None:
    tokens = prompt(401)
    with open_well() as well:
        for found in (0, 400):
            with engine(tmp_path, well, windows=(0, 64), **POOL) as h:
                assert external(h, tokens) == found


def test_layers_of_one_group_keep_all_tokens_whatever_their_windows(tmp_path: Path) -> None:
    """vLLM's hybrid KV cache manager may be switched off: its group then still says how far its layers look."""
    prompts = [prompt(401, seed) for seed in range(4)]
    with open_well() as well, engine(tmp_path, well, rows=40, windows=(0, 64), one_group=True) as h:
        assert groups(h) == 1
        served(h, prompts)
        assert [external(h, tokens) for tokens in prompts] == [400] * 4


def test_a_prompt_beyond_the_cpu_tier_leaves_room_for_its_windows(tmp_path: Path) -> None:
    tokens = prompt(801)
    hybrid = {"windows": (0, 64, 64), "layers": 3, "dense": True, **POOL}
    with open_well() as well:
        with engine(tmp_path, well, rows=192, **hybrid) as h:
            served(h, [tokens])
        with engine(tmp_path, well, rows=48, **hybrid) as h:
            assert external(h, tokens) == (48 * MAX_PROMOTED - 2 * 4) * 16


def test_a_window_is_looked_for_where_another_prompt_ended(tmp_path: Path) -> None:
    """vLLM keeps a window where a prompt ended: the next turn's prompt finds it behind the answer to that one."""
    with open_well() as well, engine(tmp_path, well, rows=64, windows=(0, 64), **POOL) as h:
        first = h.serve(prompt(401), max_tokens=100)
        settle(h)
        served(h, [prompt(401, seed) for seed in (2, 3, 4)])
        assert external(h, [*first.prompt, *first.tokens, *prompt(100, 9)]) == 400


def test_a_request_waits_for_what_another_one_loads(tmp_path: Path) -> None:
    """It learns from its own lookups how far it reaches, so that it looks for windows there, and not again and again
    where the well has none."""
    shared, pool = prompt(401), {"num_pages": 513, "max_model_len": 2048}
    with open_well() as well:
        with engine(tmp_path, well, windows=(0, 64), **pool) as h:
            served(h, [shared])
        with engine(tmp_path, well, windows=(0, 64), **pool) as h:
            tier = h.connector.connector_scheduler.manager.secondary_tiers[0]
            go = threading.Event()
            copy = tier._transfers._copy

            def when_told(*args: Any) -> Any:
                go.wait()
                return copy(*args)

            with patch.object(tier._transfers, "_copy", when_told):
                first = h.add(shared)
                h.run_until(lambda: tier._transfers.unreported)
                other = h.add([*shared, *prompt(16 * WINDOW_ENDS * (MAX_SEARCHES + 1) + 1, 2)])
                for _ in range(4 * MAX_ROUNDS):
                    h.step()
                    time.sleep(0.001)
                go.set()
                h.run()
            assert [h.requests[name].cached for name in (first, other)] == [400, 400]


@pytest.mark.parametrize("windows", [(0,), (0, 64)], ids=str)
def test_chunks_that_came_from_elsewhere_keep_nothing_waiting(tmp_path: Path, windows: tuple[int, ...]) -> None:
    """A request asks for its chunks, and before it is looked at again one behind it, which asks for nothing, has
    computed the same ones: vLLM has them and looks them up no more. Nothing stays pinned until it ends."""
    tokens = prompt(401)
    pool = {"num_pages": 513, "max_model_len": 2048}
    with open_well() as well, engine(tmp_path, well, rows=512, windows=windows, layers=2, **pool) as h:
        served(h, [tokens])
        h.reset_prefix_cache()
        h.connector.connector_scheduler.manager.primary_tier.reset_cache()
        first = h.add(tokens, max_tokens=100_000)
        h.add([*tokens, *prompt(100, 2)], prompt_logprobs=1)
        h.run_until(lambda: bool(h.requests[first].tokens))
        began = time.monotonic()
        while well.stats()["pinned_bytes"] and time.monotonic() - began < 10 * HELD_S:
            h.step()
        assert well.stats()["pinned_bytes"] == 0 and h.requests[first].finish_reason is None
        h.abort(first)


def test_a_window_does_not_wait_for_chunks_that_came_from_elsewhere(tmp_path: Path) -> None:
    shared, pool = prompt(401), {"num_pages": 513, "max_model_len": 2048}
    with (
        open_well() as well,
        engine(tmp_path, well, rows=512, windows=(0, 64), prefix_caching=False, **pool) as h,
    ):
        first = h.add(shared)
        h.add([*shared, *prompt(600, 2)], prompt_logprobs=1)  # vLLM looks up nothing for it, and it overtakes
        h.run_until(lambda: h.requests[first].finish_reason is not None)


@pytest.mark.parametrize("stored", [False, True])
def test_a_window_is_looked_for_in_few_steps(tmp_path: Path, stored: bool) -> None:
    """Of 50 chunks at which a window may end, none is stored, or one 25 chunks back: two steps for each 16."""
    first, more = prompt(401), prompt(400, 9)
    with open_well() as well, engine(tmp_path, well, rows=512, windows=(0, 64), num_pages=513, max_model_len=2048) as h:
        if stored:
            served(h, [first])
        served(h, [[*first, *more, *prompt(600, 2)]])
        h.reset_prefix_cache()
        h.connector.connector_scheduler.manager.primary_tier.reset_cache()
        before = h.steps
        assert external(h, [*first, *more]) == (400 if stored else 0)
        assert h.steps - before < 16
        settle(h)
        assert well.stats()["pinned_bytes"] == 0
