"""Recalls under engine options that other modules leave as they are; the table of options names these tests."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the engine")

from stepwell.engines.paged import open_copies
from stepwell.engines.vllm.connector import StepwellConnector

from .local import Engine, engine, open_well, prompt, setup_in


def served(h: Engine, seed: int = 1) -> None:
    """A prompt and its answer come back whole, and right."""
    cold = h.serve(prompt(200, seed), max_tokens=40)
    warm = h.recall([*prompt(200, seed), *cold.tokens], max_tokens=5)
    assert (warm.local, warm.external) == (0, 239 // h.setup.page * h.setup.page)
    assert h.right(cold) and h.right(warm)
    h.assert_quiet()


def test_without_the_engines_own_prefix_cache(tmp_path: Path) -> None:
    with engine(tmp_path, prefix_caching=False) as h:
        assert not h.config.cache_config.enable_prefix_caching
        served(h)


def test_without_chunked_prefill(tmp_path: Path) -> None:
    with engine(tmp_path, chunked_prefill=False, batch_tokens=1024) as h:
        assert not h.config.scheduler_config.enable_chunked_prefill
        served(h)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_scheduling_beside_the_forward_or_after_it(tmp_path: Path, asynchronous: bool) -> None:
    with engine(tmp_path, async_scheduling=asynchronous) as h:
        assert h.config.scheduler_config.async_scheduling is asynchronous
        served(h)


def test_engines_of_a_data_parallel_group_share_blocks(tmp_path: Path) -> None:
    setups = [setup_in(tmp_path, data_rank=rank, engine_id=f"engine_dp{rank}") for rank in range(2)]
    with open_well("32MiB") as well, Engine(setups[0], well) as a, Engine(setups[1], well) as b:
        assert [each.config.parallel_config.data_parallel_rank for each in (a, b)] == [0, 1]
        a.serve(prompt(200))
        seen = b.serve(prompt(200), max_tokens=5)
        assert (seen.external, b.right(seen)) == (192, True)
        served(a)
        b.assert_quiet()


def test_an_engine_with_adapters_serves_the_model_itself(tmp_path: Path) -> None:
    with engine(tmp_path, lora=True) as h:
        assert h.config.lora_config is not None
        served(h)


def test_a_multimodal_engine_serves_prompts_of_tokens(tmp_path: Path) -> None:
    with engine(tmp_path, multimodal=True) as h:
        assert h.config.model_config.is_multimodal_model
        served(h)


def test_requests_in_an_order_of_their_own(tmp_path: Path) -> None:
    """An urgent request pushes one out that came before it, as there is no room for both."""
    with engine(tmp_path, policy="priority", num_pages=33) as h:
        first = h.add(prompt(200), max_tokens=150, priority=1)
        h.step()
        urgent = h.add(prompt(200, seed=2), max_tokens=150, priority=0)
        h.run()
        assert h.requests[first].preemptions > 0 and h.requests[urgent].preemptions == 0
        assert h.right(h.requests[first]) and h.right(h.requests[urgent])
        served(h, seed=3)


@pytest.mark.parametrize("fields", [{}, {"ranks": 2}, {"layers": 4}, {"prefix_caching": False}], ids=str)
def test_layers_whose_pages_differ_in_size_are_recalled(tmp_path: Path, fields: dict[str, Any]) -> None:
    with engine(tmp_path, uneven=True, **fields) as h:
        assert len({layer.shape[-1] for layer in h.workers[0].words}) == h.setup.layers
        served(h)


def test_models_that_differ_in_the_pages_of_one_layer_share_nothing(tmp_path: Path) -> None:
    with open_well("32MiB") as well:
        with Engine(setup_in(tmp_path), well) as a:
            a.serve(prompt(200))
        with Engine(replace(setup_in(tmp_path), uneven=True), well) as b:
            assert b.serve(prompt(200), max_tokens=3).external == 0
            served(b)


def test_pages_that_the_scheduler_is_told_wrong_leave_the_connector_inert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a model with padded layers of several sizes, whose padding the scheduler's configuration does not tell."""

    def copier(kv_caches: Any, num_pages: int) -> Any:
        return open_copies(dict(list(kv_caches.items())[:1]), num_pages)

    monkeypatch.setattr(StepwellConnector, "copier", staticmethod(copier))
    with caplog.at_level(logging.ERROR, "stepwell"), engine(tmp_path) as h:
        told = [record.getMessage() for record in caplog.records if "SW-" in record.getMessage()]
        assert len(told) == 1 and "SW-707" in told[0] and "page sizes" in told[0], told
        assert h.right(h.serve(prompt(100), max_tokens=3))
        h.assert_clean()
