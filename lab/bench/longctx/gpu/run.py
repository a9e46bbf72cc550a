"""Decoding across tiers on a GPU: tokens a second, waiting, and what the link to host memory carries. Unverified until
it has run on one.

A Llama with the shape of the 8B model and random weights, in bf16, built on the device. Its context is random, too: K
and V are made layer by layer and adopted as a prompt would have left them, so that nothing is prefilled. What is
selected is injected (`injected`), at the shares that were measured on documents. All cold pages lie in pinned memory of
the host. The link's peak is that of one large pinned copy, measured in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lab.bench.longctx.gpu.injected import Trace
from lab.bench.longctx.setup import left_out, one
from lab.bench.longctx.stage import SKIPPED, Stage
from lab.bench.report import Result, Row
from stepwell.demo.results import stats
from stepwell.longctx import Policy, TieredCache, attach, policies
from stepwell.longctx.kv.fetch.arrival import timing
from stepwell.longctx.model import foresight
from stepwell.longctx.parts.index.rotated import RotatedKeys
from stepwell.longctx.parts.select.topk import TopK
from stepwell.longctx.store.link import ModelledLink

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256},
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512},
}  # fmt: skip
CONTEXTS = {"llama-8b": (32_768, 65_536, 131_072), "tiny": (2_048, 4_096)}
HOT_SHARE, SHARE, FRESH, WRONG = 1 / 16, 0.125, 0.35, 0.25
"""Of the context: hot, and selected in a step. Of the selection: new in a step (measured 0.32 to 0.35 at this share on
documents), and foretold wrongly."""
WARM, STEPS, EXACT_STEPS = 3, 24, 4
_PEAK_BYTES, _COPIES = 256 << 20, 8


def run(stage: Stage, device: str, shape: str, contexts: Sequence[int]) -> Result:
    torch.manual_seed(0)
    model = _model(shape, device)
    peak = pinned_peak(device, stage.quick or shape == "tiny")
    rows: list[Row] = [one("one large pinned copy into the device", "GB/s", peak / 1e9)]
    for context in contexts:
        for name in ("stepwell", "exact"):
            rows += _policy(model, name, context, peak, stage)
    where = "on a GPU" if device == "cuda" else "WITHOUT a GPU: shows that it runs, and means nothing"
    return Result("gpu-longctx", rows, {"steps": STEPS}, [
        f"{shape} shape, random weights, {model.dtype}, injected selections ({100 * SHARE:g} % of the context, "
        f"{100 * FRESH:g} % new in a step, {100 * WRONG:g} % foretold wrongly), hot {100 * HOT_SHARE:g} %, cold "
        f"pages in pinned host memory, {where}",
    ])  # fmt: skip


def _model(shape: str, device: str) -> Any:
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=1 << 18)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def pinned_peak(device: str, small: bool) -> float:
    """Bytes/s of a large copy from pinned memory into the device, the best of several."""
    nbytes = _PEAK_BYTES // 16 if small else _PEAK_BYTES
    source = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device == "cuda")
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    best = 0.0
    for _ in range(_COPIES):
        wait(device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        wait(device)
        best = max(best, nbytes / (time.perf_counter() - began))
    return best


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class RandomContext:
    """In place of a `DynamicCache` after a prompt: `layers`, made one after the other, so that no two of them are on
    the device at a time."""

    def __init__(self, model: Any, tokens: int) -> None:
        self._config, self._tokens = model.config, tokens
        self._options = {"dtype": model.dtype, "device": model.device}

    @property
    def layers(self) -> Iterator[Any]:
        size = 1, self._config.num_key_value_heads, self._tokens, self._config.head_dim
        for _ in range(self._config.num_hidden_layers):
            yield SimpleNamespace(keys=torch.randn(size, **self._options), values=torch.randn(size, **self._options))


def policy_of(name: str) -> tuple[Policy, Trace | None]:
    """Of a name; where it selects, by a trace."""
    if name != "stepwell":
        return policies.named(name), None
    trace = Trace(RotatedKeys(bits=2, centred=True), SHARE, FRESH, WRONG, foretold_from=foresight.FIRST)
    return replace(policies.STEPWELL, index=trace, selector=TopK(SHARE)), trace


@dataclass(frozen=True, slots=True)
class Decoded:
    """`stall`: seconds that the host waited for pages; `waits`: that the device did."""

    seconds: list[float]
    stall: float
    waits: float
    fetch: float
    nbytes: int

    @property
    def hidden(self) -> float:
        return 1 - min(1.0, self.stall / self.fetch) if self.fetch else 1.0


@torch.no_grad()
def decode(model: Any, name: str, context: int, steps: int, stage: Stage) -> Decoded:
    """At least one counted step, then as many as there is time for. Raises StepwellError where memory does not do."""
    device = model.device.type
    policy, trace = policy_of(name)
    # Lossless while a layer is adopted, which for EXACT it remains; float32 is the largest.
    token = 2 * model.config.num_key_value_heads * model.config.head_dim * model.dtype.itemsize
    layers = model.config.num_hidden_layers if name == "exact" else model.config.num_hidden_layers // 2 + 2
    hot = max(256, round(HOT_SHARE * context))
    link = None if device == "cuda" else ModelledLink(1e15)  # so that it is read beside the model here, too
    cache = TieredCache(model.config, policy, hot_tokens=hot, host=token * layers * (context + 4096), link=link)
    try:
        cache.adopt(RandomContext(model, context))  # type: ignore[arg-type]
        ledger = cache.ledger
        seconds: list[float] = []
        token_id = torch.zeros(1, 1, dtype=torch.long, device=device)
        with attach(model, policy, hot_tokens=hot), timing() as waited:
            for step in range(WARM + steps):
                if step == WARM:
                    before = ledger.cold_to_hot(), ledger.seconds["stall"], ledger.seconds["fetch"], waited()
                if trace is not None:
                    trace.step = step
                wait(device)
                began = time.perf_counter()
                model(token_id, past_key_values=cache)
                wait(device)
                if step >= WARM:
                    seconds.append(time.perf_counter() - began)
                    if stage.over:
                        break
            waits = waited()
        brought, stall, fetch, waits_before = before
        return Decoded(
            seconds,
            ledger.seconds["stall"] - stall,
            waits - waits_before,
            ledger.seconds["fetch"] - fetch,
            ledger.cold_to_hot() - brought,
        )
    finally:
        cache.close()


def _policy(model: Any, name: str, context: int, peak: float, stage: Stage) -> Iterator[Row]:
    found = None
    if not stage.over:
        steps = 4 if stage.quick else STEPS if name == "stepwell" else EXACT_STEPS
        found = decode(model, name, context, steps, stage)
    yield from told(name, context, found, peak)


def told(name: str, context: int, found: Decoded | None, peak: float) -> Iterator[Row]:
    """`found` None: there was no time for it."""
    where = f"{name}, {context // 1024}K tokens"
    hidden = f"{where}: share of the host's fetching time hidden"
    sustained = f"{where}: sustained bandwidth of the link over its peak"
    if found is None:
        yield left_out(hidden, "", None, SKIPPED)
        yield left_out(sustained, "", None, SKIPPED)
        return
    spent, count = sum(found.seconds), len(found.seconds)
    yield one(hidden, "", found.hidden, None, f"{count} steps")
    yield Row("  tokens a second", "", stats.median([1 / each for each in found.seconds]))
    yield one("  share of the time that the device waited for pages", "", found.waits / spent)
    yield one("  share of the time that the host did", "", found.stall / spent)
    yield one("  brought up by a step", "MiB", found.nbytes / count / 2**20)
    rate = found.nbytes / spent
    yield one(sustained, "", rate / peak, None, f"{rate / 1e9:.2f} GB/s")
