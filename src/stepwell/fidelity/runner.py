"""Runs documents under a policy, and under full attention. The only file here that knows `stepwell.longctx`'s machine.

Every run starts from the same prefilled KV and is fed the same tokens, one at a time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from stepwell.errors import ConfigError
from stepwell.fidelity.document import SINKS, WINDOW
from stepwell.fidelity.options import ORACLE, RANDOM, RECENCY, Config
from stepwell.fidelity.prefill import Prefilled

Tier = Literal["host", "disk"]
_FP16 = 2
_SPARE_BYTES = 64 << 20
REFERENCE = "stepwell"
"""The policy whose codec, pages and index the controls have if no other sparse policy is run."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Totals of the ledger over the steps that all documents of a run have. Sizes are of all documents together. Shares
    are of the whole context, in a step and layer on average: selected, and fetched (prefetched pages that were not
    selected included). Masses of attention left out are estimated; `true_uncovered_mass` is measured if requested, else
    0. `steps`: of all documents together."""

    steps: int
    bytes_cold_to_hot: int
    bytes_all_fp16: int
    index_bytes: int
    hot_bytes: int
    hit_rate: float = 0.0
    selected_share: float = 1.0
    fetched_share: float = 0.0
    uncovered_mass: float = 0.0
    true_uncovered_mass: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a run. `logits`: of each document [its steps, V] float32."""

    logits: Sequence[torch.Tensor]
    moved: Moved


class Runner(Protocol):
    def run(self, prefilled: Prefilled) -> Outcome: ...


@dataclass(frozen=True, slots=True)
class Full:
    """Full attention, all of it hot, one token at a time: it differs from the reference by rounding alone."""

    model: Any

    @torch.no_grad()
    def run(self, prefilled: Prefilled) -> Outcome:
        cache = prefilled.copy()
        cold = max(0, cache.get_seq_length() - SINKS - WINDOW) * len(prefilled.documents)
        logits = [_step(self.model, tokens, cache) for tokens in prefilled.feed]
        hot = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        whole = _FP16 * prefilled.token_numbers * cold * prefilled.common_steps
        steps = prefilled.common_steps * len(prefilled.documents)
        return Outcome(prefilled.of_documents(logits), Moved(steps, 0, whole, 0, hot))


@dataclass(frozen=True, slots=True)
class Tiered:
    """A policy of `stepwell.longctx`. `hot_share`: of the prompt; never less than the policy needs. `disk`: the folder
    for the disk tier, where that is asked for."""

    model: Any
    policy: Any
    tier: Tier
    hot_share: float
    disk: Path | None = None
    audit: bool = False

    @torch.no_grad()
    def run(self, prefilled: Prefilled) -> Outcome:
        from stepwell.longctx import TieredCache, attach

        tokens = prefilled.dense.get_seq_length()
        # Lossless float32 pages are the largest; twice as much leaves room for a second copy.
        count = len(prefilled.documents) * (tokens + len(prefilled.feed))
        room = 2 * 4 * prefilled.token_numbers * count + _SPARE_BYTES
        at = self.disk or Path(tempfile.gettempdir())
        places: dict[str, Any] = {"host": room} if self.tier == "host" else {"host": 0, "disk": f"{at}:{room}"}
        cache = TieredCache(
            self.model.config, self.policy, hot_tokens=self._hot_tokens(tokens), audit=self.audit, **places
        )
        try:
            cache.adopt(prefilled.dense, prefilled.queries)
            logits, cold_numbers, moved = [], 0, None
            with attach(self.model):
                for step, token in enumerate(prefilled.feed, 1):
                    cold_numbers += _cold_numbers(cache)
                    logits.append(_step(self.model, token, cache))
                    if step == prefilled.common_steps:
                        cache.measure()
                        moved = _moved(cache, step * len(prefilled.documents), cold_numbers, tokens)
            assert moved is not None
            return Outcome(prefilled.of_documents(logits), moved)
        finally:
            cache.close()

    def _hot_tokens(self, tokens: int) -> int:
        least = _least_hot(self.policy)
        keeps_nothing = self.policy.residency is None and self.policy.window is not None
        return least if keeps_nothing else max(round(self.hot_share * tokens), least)


def granularity(page_tokens: int) -> str:
    """The name of a page size in rows."""
    return "token" if page_tokens == 1 else f"page {page_tokens}"


def policy_of(config: Config, budget: float, like: Any = None) -> Any:
    """A policy at a budget and a granularity. Controls are as the policy `like` (the reference, if None) in all but
    what they select, and keep nothing of what they fetched: where that policy does, recency and chance have the newest
    tokens in the room for it, and the oracle, which selects tokens for each KV head, does without. Raises what
    `policies.named` raises for a name that it does not know."""
    from stepwell.longctx import AttentionMode, policies
    from stepwell.longctx.parts.index.exact import TrueKeys
    from stepwell.longctx.parts.select.controls import RandomPages, Recent
    from stepwell.longctx.parts.select.topk import TopK

    if config.control:
        policy = like or policies.named(REFERENCE)
        newest = {"window": None if policy.residency is not None else policy.window}
        controls: dict[str, dict[str, Any]] = {
            ORACLE: {
                "selector": TopK(budget), "index": TrueKeys(), "page_tokens": 1, "joint": False,
                "window": policy.window or WINDOW,
            },
            RECENCY: {"selector": Recent(budget), **newest},
            RANDOM: {"selector": RandomPages(budget), **newest},
        }  # fmt: skip
        plain = {"mode": AttentionMode.SPARSE, "query": "actual", "executor": "fetch", "predicted_math": False}
        alone = {"residency": None, "prefetch": False, "new_pages": None, "late_mass": None}
        policy = replace(policy, name=config.name, **plain, **alone, **controls[config.name])
    else:
        policy = policies.named(config.name)
        policy = replace(policy, selector=_budgeted(policy.selector, budget))
    return policy if config.page_tokens is None else replace(policy, page_tokens=config.page_tokens)


def is_exact(policy: Any) -> bool:
    """True if the policy has no budget and fetches everything. A verified policy does so here too: no token is left to
    be drafted."""
    from stepwell.longctx import AttentionMode

    return policy.mode is not AttentionMode.SPARSE


def _budgeted(selector: Any, budget: float) -> Any:
    """The same selector, with at most this share of the context. One without such a figure stays as it is."""
    names = {field.name for field in fields(selector)} if is_dataclass(selector) else set()
    if "share" in names:
        return replace(selector, share=budget)
    if "ceiling" in names:
        floor = {"floor": min(selector.floor, budget)} if "floor" in names else {}
        return replace(selector, ceiling=budget, **floor)
    return selector


def _least_hot(policy: Any) -> int:
    """The fewest hot tokens that the policy takes, found by asking for too few: it alone knows its slack."""
    from stepwell.longctx.kv.budget import HotBudget

    low, high = 1, 1 << 20
    while low < high:
        middle = (low + high) // 2
        try:
            HotBudget.divide(middle, policy)
        except ConfigError:
            low = middle + 1
        else:
            high = middle
    return low


def _step(model: Any, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
    """[B] to [B, V] float32."""
    logits: torch.Tensor = model(tokens[:, None].to(model.device), past_key_values=cache).logits
    return logits[:, -1].float()


def _cold_numbers(cache: Any) -> int:
    """Numbers in K and V of all that has stepped down, in all layers."""
    states = [layer.state for layer in cache.tiered if layer.state is not None]
    return sum(state.pages * state.lanes.of_rows(state.rows_count) * state.shape.numbers for state in states)


def _moved(cache: Any, steps: int, cold_numbers: int, tokens: int) -> Moved:
    told = cache.ledger.snapshot()
    state = next(layer.state for layer in cache.tiered)
    # Pages that would be all of the context in every step.
    all_pages = told["layer_steps"] * state.lanes.of_rows(state.rows_count) * tokens / state.shape.tokens
    fetched = told["bytes_cold_to_hot"] / state.source(exact=False).codec.page_bytes if state.pages else 0.0
    return Moved(
        steps=steps,
        bytes_cold_to_hot=told["bytes_cold_to_hot"],
        bytes_all_fp16=_FP16 * cold_numbers,
        index_bytes=told["index_bytes"],
        hot_bytes=told["hot_bytes"],
        hit_rate=told["hit_rate"],
        selected_share=told["pages"].get("selected", 0) / all_pages if all_pages else 0.0,
        fetched_share=fetched / all_pages if all_pages else 0.0,
        uncovered_mass=told["uncovered_mass"],
        true_uncovered_mass=told["true_uncovered_mass"],
    )
