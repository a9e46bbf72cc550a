"""What attaching costs when everything fits into the hot tier: seconds per token over plain transformers'.

Both sides have the same prompt in their caches and generate the same number of tokens, in turn; which of them comes
first changes from pair to pair. The caches are cropped back after each, so that no prompt is computed in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

from lab.bench.longctx import setup
from lab.bench.longctx.setup import left_out
from lab.bench.longctx.stage import SKIPPED, Stage
from lab.bench.report import Result, Row, Target
from stepwell.demo.results import stats
from stepwell.longctx import attach

AT_MOST = Target("<=", 1.05)
CONTEXT, TOKENS, PAIRS = 1024, 24, 14
POLICIES = ("exact", "stepwell")


def run(stage: Stage) -> Result:
    context, pairs = (256, 3) if stage.quick else (CONTEXT, PAIRS)
    subject = setup.subject()
    ids = setup.prose(subject.text, context)
    plain = Side(subject.model, ids, DynamicCache(config=subject.model.config), nullcontext)
    rows: list[Row] = []
    for policy in POLICIES:
        what = f"seconds per token, attach({policy!r}) over plain transformers, everything hot"
        if stage.over:
            rows.append(left_out(what, "x", AT_MOST, SKIPPED))
            continue
        with attach(subject.model, policy, hot_tokens=4 * context) as attached:
            cache = attached.new_cache()
        ours = Side(subject.model, ids, cache, partial(attach, subject.model, policy, hot_tokens=4 * context))
        found = in_pairs(ours, plain, pairs, stage)
        ratio = stats.median([a / b for a, b in found])
        rows.append(Row(what, "x", ratio, AT_MOST, f"median of {len(found)} pairs of {TOKENS} tokens"))
        for name, at in ((policy, 0), ("plain", 1)):
            rows.append(Row(f"  {name}", "ms/token", stats.median([pair[at] for pair in found]).times(1e3)))
        cache.close()
    return Result("longctx-overhead", rows, {"context_tokens": context, "generated_each_time": TOKENS}, [
        f"{subject.name}: generate of {TOKENS} tokens at {context} tokens of context, prompt in the cache",
    ])  # fmt: skip


class Side:
    """One of the two. `within`: what makes the model's generate use `cache`."""

    def __init__(
        self, model: Any, ids: torch.Tensor, cache: Any, within: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._model, self._ids, self._cache, self._within = model, ids, cache, within
        self._cached = ids.shape[1] - 2
        with torch.no_grad(), within():
            model(ids[:, : self._cached], past_key_values=cache, logits_to_keep=1)
        self.seconds()

    def seconds(self) -> float:
        """Per token of one generation."""
        with torch.no_grad(), self._within():
            began = time.perf_counter()
            self._model.generate(
                self._ids,
                past_key_values=self._cache,
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                do_sample=False,
            )
            spent = time.perf_counter() - began
        self._cache.crop(self._cached - self._cache.get_seq_length())
        return spent / TOKENS


def in_pairs(ours: Side, plain: Side, count: int, stage: Stage) -> list[tuple[float, float]]:
    """(ours, plain), each first in every other pair. At least one, then as many as there is time for."""
    found: list[tuple[float, float]] = []
    while len(found) < count and not (found and stage.over):
        if len(found) % 2:
            second = plain.seconds()
            found.append((ours.seconds(), second))
        else:
            found.append((ours.seconds(), plain.seconds()))
    return found
