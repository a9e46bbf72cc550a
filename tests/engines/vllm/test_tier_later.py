"""What vLLM 0.33, of which there is no build for CPUs, does otherwise with secondary tiers: its manager is entered by
one thread at a time, and not always by the same one; and it says of each cache group how far its window reaches."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_offload.tiering.manager", reason="this vLLM has no secondary tiers")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config

from stepwell.engines.vllm.offloading import opening
from stepwell.engines.vllm.offloading.key_runs import ChunkGroup

from .build import build
from .offloading import AT_MOST_S, LOOKS_S, keys_of, offloading, offloading_setup


def test_hooks_may_come_from_another_thread_each_time(tmp_path: Path) -> None:
    keys = keys_of("a", 9)

    def elsewhere(hook: Callable[..., Any], *args: Any) -> Any:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(hook, *args).result()

    with offloading(tmp_path) as engine:
        elsewhere(engine.store, keys)
        elsewhere(engine.forget)
        context = elsewhere(engine.request, "r")
        for _ in range(int(AT_MOST_S / LOOKS_S)):
            found = elsewhere(engine.look, keys, context)
            elsewhere(engine.step)
            if found is not None:
                break
        assert found == 9
        engine.assert_loaded(keys, context)
        elsewhere(engine.finish, context)
        elsewhere(engine.reset)


@pytest.mark.parametrize("said", [False, True])
def test_windows_are_those_that_vllm_looks_for(tmp_path: Path, said: bool) -> None:
    """By the number that keys have: vLLM leaves out groups that it does not offload, and counts on."""
    built = build(offloading_setup(tmp_path, rows=16, windows=(0, 64), num_pages=129, max_model_len=512))
    _, group = build_offloading_config(built.vllm_config, built.scheduler_kv).groups
    assert group.group_id == 1
    if said:
        group = SimpleNamespace(group_id=1, tokens_per_block=16, sliding_window_size_in_chunks=4)  # type: ignore[assignment]
    spec = SimpleNamespace(config=SimpleNamespace(groups=[group]), blocks_per_chunk=1)
    assert opening.groups(spec, built.scheduler_kv) == {1: ChunkGroup(16, 4)}
