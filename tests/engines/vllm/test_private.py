"""All that is used of vLLM and its libraries beyond what they promise. Each may be gone in their next version: then
something is off, or an identity is one that no other has, and an engine starts and serves all the same."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

import torch
from prometheus_client import REGISTRY
from vllm import _custom_ops
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.engine.core import EngineCore

from stepwell.engines import common, vllm
from stepwell.engines.vllm.hooks.stats import prom_metrics
from stepwell.engines.vllm.identity.facts import _isa
from stepwell.engines.vllm.opening import Opening

USED: dict[str, tuple[Any, str]] = {
    "_get_attn_isa": (cpu_attn, "identity: the ISA is unknown, as is nobody else's but of the same CPU"),
    "_is_avx512_supported": (torch.cpu, "the same"),
    "_is_avx512_bf16_supported": (torch.cpu, "the same"),
    "_counter_cls": (KVConnectorPromMetrics, "no counters of ours in the engine's /metrics"),
    "_collector_to_names": (REGISTRY, "the same"),
    "add_lora": (EngineCore, "requests with an adapter bypass"),
    "_custom_ops": (_custom_ops, "MLA leaves the connector inert where the engine keeps no prefix of it"),
}
"""Name, who has it, and what is off without it."""


@pytest.mark.parametrize("name", [name for name in USED if "isa" in name or "avx512" in name])
def test_without_it_pages_are_shared_only_with_the_same_cpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delattr(USED[name][0], name)
    config: Any = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    found = _isa(config, [])
    assert found.startswith("unknown: ") and len(found) > len("unknown: ")


@pytest.mark.parametrize("name", ["_counter_cls", "_collector_to_names"])
def test_without_it_the_engines_server_starts_without_our_counters(
    monkeypatch: pytest.MonkeyPatch, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(KVConnectorPromMetrics, "__init__", lambda self, *arguments: None)  # which sets `_counter_cls`
    monkeypatch.delattr(USED[name][0], name, raising=name != "_counter_cls")
    assert prom_metrics(None, {}, ["engine"], {0: ["0"]}) is None
    assert name in caplog.text


def test_without_it_requests_with_an_adapter_bypass(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(EngineCore, "add_lora")
    opening = Opening.__new__(Opening)
    opening._config = SimpleNamespace(lora_config=object())  # type: ignore[assignment]
    opening._adapters = None
    assert opening._open_adapters() is None
    assert "bypass" in caplog.text


def test_nothing_else_that_is_private_is_used() -> None:
    """Of modules and classes that the adapter imports: `module._name`, and `from module import _name`."""
    found: set[str] = set()
    for path in [path for package in (common, vllm) for path in Path(package.__path__[0]).rglob("*.py")]:
        tree = ast.parse(path.read_text())
        theirs: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                theirs |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("stepwell"):
                theirs |= {alias.asname or alias.name for alias in node.names}
                found |= {alias.name for alias in node.names if alias.name.startswith("_")}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                root = node.value
                while isinstance(root, ast.Attribute):
                    root = root.value
                if isinstance(root, ast.Name) and root.id in theirs - {"sys"}:
                    found.add(node.attr)
    assert found <= USED.keys(), found - USED.keys()
    assert found >= {"_get_attn_isa", "_is_avx512_supported", "_collector_to_names"}
