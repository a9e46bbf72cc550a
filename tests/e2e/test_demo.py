"""The demo with models of the user's own, tiny ones: it recalls before and after each restart, and every answer is the
same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the engine")

from vllm import _custom_ops
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from lab.rig.tiny import KINDS, write_model
from stepwell.demo.results import report
from stepwell.demo.run import DemoOptions, run

DOCUMENTS = 3
NATIVE = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}  # vLLM's CPU kernel misreads some queries
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
LINES = {
    "gemma3": "answers identical to an engine hit's: yes, all",
    "lfm2": "answers identical to an engine hit's: yes, all",
    "deepseek": "answers identical to cold ones, as this engine has no hits: yes, all",
}
BYTES = {"gemma3": (512, 1024), "lfm2": (512, 1024), "deepseek": (3 * 576 * 4, 3 * 576 * 4)}
"""Bytes of a token: those of the layers that need every token, and not twice as many with windows and states."""


@pytest.mark.nightly
@pytest.mark.skipif(
    not hasattr(base, "KVConnectorTransferResults") or not hasattr(_custom_ops, "gather_mla_context_cache_cpu"),
    reason="not all of these models are served with this vLLM",
)
@pytest.mark.parametrize(
    ("kind", "engine"), [("gemma3", {"speculative_config": NGRAM}), ("lfm2", NATIVE), ("deepseek", NATIVE)]
)
def test_the_demo_recalls_models_of_each_kind(
    kind: str, engine: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = write_model(KINDS[kind], tmp_path / kind)
    result = run(DemoOptions(model, DOCUMENTS, rounds=1, engine={"dtype": "float32"} | engine, block_tokens=128))
    print(report.text(result))
    assert result.ok
    assert result.dropped_pairs == result.dropped_not_recalled, "as on a machine that is far too busy, and no other"
    assert LINES[kind] in report.text(result)
    least, most = BYTES[kind]
    assert result.recalled_token_bytes is not None and least <= result.recalled_token_bytes <= most
