"""What the connector makes of vLLM's configuration and interfaces when it starts."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="needs the engine")

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from stepwell.config.settings import Settings
from stepwell.engines.vllm.connector import StepwellConnector
from stepwell.engines.vllm.plugin import register
from stepwell.errors import BackendDown
from stepwell.serve.options import judge

from .harness import Harness
from .local import Engine, joining, open_well, prompt, setup_in


def test_hooks_that_are_gone() -> None:
    """Every member that the connector overrides exists in vLLM's base class, with a signature that takes its calls."""
    ours = {"copier", "dialler", "lanes", "threaded"}
    if not hasattr(KVConnectorBase_V1, "supports_sleep_mode"):
        ours |= {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"}  # of vLLM 0.33
    bases = {**vars(SupportsHMA), **vars(KVConnectorBase_V1)}
    for name, member in vars(StepwellConnector).items():
        if name in ours or (name.startswith("_") and name not in ("__init__", "_cache_hit_source")):
            continue
        base = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name, None)
        assert base is not None or name in bases, f"vLLM has no {name} any more"
        if inspect.isfunction(member) and inspect.isfunction(base):
            mine, theirs = inspect.signature(member).parameters, inspect.signature(base).parameters
            positional = [p.name for p in theirs.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
            assert [p.name for p in mine.values() if p.kind is p.POSITIONAL_OR_KEYWORD][: len(positional)] == positional
    assert not StepwellConnector.__abstractmethods__
    fields = {
        SchedulerOutput: "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens finished_req_ids "
        "preempted_req_ids",
        NewRequestData: "req_id block_ids num_computed_tokens",
        CachedRequestData: "req_ids new_block_ids num_computed_tokens resumed_req_ids",
        KVConnectorOutput: "kv_connector_worker_meta invalid_block_ids",
    }
    for kind, names in fields.items():
        assert set(names.split()) <= set(inspect.signature(kind).parameters), kind
    request = Request("r", [1, 2], SamplingParams(max_tokens=1), None)
    names = "request_id num_tokens all_token_ids cache_salt skip_reading_prefix_cache num_computed_tokens is_finished"
    for name in [*names.split(), "lora_request", "mm_features", "prompt_embeds", "resumable"]:
        assert hasattr(request, name), name


def test_a_misspelt_key_of_the_extra_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_well("32MiB") as well, caplog.at_level(logging.WARNING, "stepwell"):
        well.hierarchy._members.follow(judge(Settings()))  # as a well of its own process does
        with Engine(setup_in(tmp_path, extra={"hots": "1GiB"}), well) as h:
            assert h.right(h.serve(prompt(100), max_tokens=3))
            told = [r.getMessage() for r in caplog.records if "hots" in r.getMessage()]
            assert told and "host" in told[0], told
            assert len(told) <= 2  # one of each half that asked
            h.assert_clean()


@pytest.mark.parametrize(("version", "warned"), [("0.31.2", 0), ("0.32.0+cpu", 0), ("0.33.0", 1), ("0.3", 1)])
def test_an_untested_engine_is_told_so_once(
    tmp_path: Path, version: str, warned: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    with open_well("32MiB") as well, caplog.at_level(logging.WARNING, "stepwell"):
        with Engine(setup_in(tmp_path), well) as h:
            assert h.half is not None, "a warning, no refusal"
        told = [r for r in caplog.records if "not tested" in r.getMessage()]
        assert len(told) == warned
        assert all(version in r.getMessage() for r in told)


INERT = [
    ({"kv_role": "kv_producer"}, "SW-706"),
    ({"extra": {"block_tokens": 24}}, "SW-102"),
    ({"extra": {"strict": "yes"}}, "SW-102"),
    ({"extra": {"canary": -1}}, "SW-102"),
    ({"extra": {"canary": True}}, "SW-102"),
    ({"extra": {"receipts": "yes"}}, "SW-102"),
    ({"extra": {"receipts": 1}}, "SW-102"),
    ({"extra": {"home": 3}}, "SW-102"),
    ({"extra": {"socket": "well.sock"}}, "SW-102"),
    ({"extra": {"weights_id": ""}}, "SW-102"),
    ({"extra": {"host": ["1GiB"]}}, "SW-102"),
]


@pytest.mark.parametrize(("fields", "code"), INERT, ids=str)
def test_what_cannot_be_served_leaves_the_connector_inert(
    tmp_path: Path, fields: dict[str, Any], code: str, caplog: pytest.LogCaptureFixture
) -> None:
    with open_well("32MiB") as well, caplog.at_level(logging.ERROR, "stepwell"):
        with Engine(setup_in(tmp_path, **fields), well) as h:
            assert h.half is None
            told = [r for r in caplog.records if code in r.getMessage()]
            assert len(told) == 1, "one line, of the scheduler's process"
            assert h.right(h.serve(prompt(100), max_tokens=3))
            assert h.reset_prefix_cache(connector=True)
            assert len([r for r in caplog.records if r.name == "stepwell"]) == 1, "and no hook that raises"
            h.assert_clean()
        strict = {**fields, "extra": {**fields.get("extra", {}), "strict": True}}
        if fields.get("extra", {}).get("strict") is None:
            with pytest.raises(Exception, match=code):
                Engine(setup_in(tmp_path, **strict), well)


def test_strict_refuses_to_start_without_a_well(tmp_path: Path) -> None:
    def find() -> Any:
        raise BackendDown("SW-502", what="the well did not start", why="a test", fix="none")

    with joining(open_well("32MiB"), find):
        with pytest.raises(BackendDown, match="SW-502"):
            Harness(setup_in(tmp_path, extra={"strict": True}))
        with Harness(setup_in(tmp_path)) as h:
            outcome = h.serve(prompt(100), max_tokens=3)
            assert outcome.finish_reason == "length"
            h.assert_clean()


def test_the_plugin_may_be_loaded_twice() -> None:
    register()
    register()


def test_a_vllm_without_a_hook_that_answers_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests would wait for ever."""
    monkeypatch.setattr("stepwell.engines.vllm.connector.ANSWERS", ("get_finished", "get_finished_loads"))
    with open_well("32MiB") as well, Engine(setup_in(tmp_path), well) as h:
        assert h.half is None and h.workers[0].connector._work is None
        assert h.right(h.serve(prompt(100), max_tokens=3))
        h.assert_clean()


def test_a_worker_whose_half_cannot_be_made_leaves(tmp_path: Path) -> None:
    with (
        open_well("32MiB") as well,
        patch("stepwell.engines.vllm.opening.WorkerHalf", side_effect=RuntimeError("on purpose")),
        Engine(setup_in(tmp_path), well) as h,
    ):
        assert not h.client.live, "or it would recall into nothing"
        assert h.right(h.serve(prompt(100), max_tokens=3))
        assert h.right(h.recall(prompt(100), max_tokens=3))
        h.assert_clean()
