"""HillInfer's anchor (arXiv 2602.18750): what crosses to and from the data to find the best pages, over reading keys.

The policy `hillinfer` scores in a process that owns the cold file: queries go there, pages and scores come back. Each
byte of both ways counts, as the ledger does; beside it stands what all cold keys are in fp16, which a policy that
scores on the model's side without an index would have to read in each step.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from lab.bench.longctx import setup
from lab.bench.longctx.setup import left_out, one
from lab.bench.longctx.stage import SKIPPED, Stage
from lab.bench.report import Result, Row, Target
from stepwell.demo.results import stats
from stepwell.fidelity.prefill import prefill
from stepwell.fidelity.results.metrics import compare
from stepwell.longctx import TieredCache, attach
from stepwell.longctx.ledger import Ledger

LESS = Target(">=", 20)
TASKS, CONTEXT, STEPS, HOT = ("kvtable", "nat(64)"), 2048, 48, 512
_FP16 = 2


def run(stage: Stage) -> Result:
    context, steps, tasks = (512, 6, TASKS[:1]) if stage.quick else (CONTEXT, STEPS, TASKS)
    subject = setup.subject()
    rows: list[Row] = []
    for task in tasks:
        what = f"bytes of all cold keys over those that cross for scoring, {task.partition('(')[0]}"
        if stage.over:
            rows.append(left_out(what, "x", LESS, SKIPPED))
        else:
            rows += _task(subject, task, context, steps, what)
    return Result("longctx-near", rows, {"context_tokens": context, "steps": steps}, [
        f"{subject.name}: policy 'hillinfer' (4-bit token scores in a process of its own, 15 % selected, tokens and KV "
        f"heads apart), {context} tokens, hot_tokens={HOT // 4 if stage.quick else HOT}, cold pages on disk, "
        "teacher-forced",
    ])  # fmt: skip


@torch.no_grad()
def _task(subject: setup.Subject, task: str, context: int, steps: int, what: str) -> list[Row]:
    model: Any = subject.model
    made = setup.document(subject.text, task, context)
    prompt = prefill(model, [made])
    ratios, logits = [], []
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"hot_tokens": HOT if context == CONTEXT else HOT // 4, "host": None}
        options["disk"] = setup.on_disk(folder, 2)
        cache = TieredCache(model.config, "hillinfer", **options)
        try:
            cache.adopt(prompt.dense, prompt.queries)
            with attach(model, "hillinfer", **options):
                for token in prompt.feed[:steps]:
                    keys, before = cold_keys(cache), crossed(cache.ledger)
                    logits.append(model(token[:, None], past_key_values=cache).logits[0].float())
                    ratios.append((float(keys), float(crossed(cache.ledger) - before)))
            asked, answered = (cache.ledger.bytes[way] / steps / 1024 for way in WAYS)
        finally:
            cache.close()
    short = type(made)(made.prompt, made.continuation[:steps], (), made.intensity)
    found = compare(short, prompt.logits[0][:steps], torch.cat(logits))
    return [
        Row(what, "x", stats.ratio_of_paired_means(ratios), LESS, f"{steps} steps, both ways counted"),
        one("  queries that go there, of a step", "KiB", asked),
        one("  pages and scores that come back, of a step", "KiB", answered),
        one("  cold keys in fp16, of a step", "KiB", sum(keys for keys, _ in ratios) / steps / 1024),
        Row("  mean KL to full attention", "nat", stats.mean(found.kl.tolist())),
    ]


WAYS = (("hot", "cold", "score"), ("cold", "hot", "score"))


def crossed(ledger: Ledger) -> int:
    """Bytes for scoring so far, both ways."""
    return sum(ledger.bytes[way] for way in WAYS)


def cold_keys(cache: TieredCache) -> int:
    """Bytes of the keys that have stepped down, in fp16, of all layers."""
    states = [layer.state for layer in cache.tiered if layer.state is not None]
    return sum(
        _FP16 * state.pages * state.shape.tokens * state.lanes.kv_heads * state.rows_count * state.shape.key_dim
        for state in states
    )
