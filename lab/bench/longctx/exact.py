"""EXACT against full attention: float32 from disk at 8K tokens, bf16 beside SDPA's own bf16, a left-padded batch.

Prompts are computed in parts through the tiers, then tokens are fed one at a time (teacher-forced), and every
next-token distribution is compared with that of one plain SDPA pass over the same tokens.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import DynamicCache

from lab.bench.longctx import setup
from lab.bench.longctx.likeness import Likeness, likeness
from lab.bench.longctx.setup import left_out, one
from lab.bench.longctx.stage import SKIPPED, Stage
from lab.bench.report import Result, Row, Target
from stepwell.demo.results import stats
from stepwell.longctx import TieredCache, attach

LOGITS, KL, COLD, BF16 = Target("<=", 3e-4), Target("<=", 2e-7), Target(">=", 0.9), Target("<=", 1.5)
STEPS, HOT, PREFILL = 32, 512, 1024
_OF_BF16 = "bf16: mean KL to the float32 reference, of EXACT over that of SDPA"
_PADDED = "left-padded batch of 3: max |difference of logits| to SDPA"


def run(stage: Stage) -> Result:
    tokens = 1024 if stage.quick else 8192
    subject = setup.subject()
    ids = setup.prose(subject.text, tokens)
    rows = [*_float32(subject.model, ids, 128 if stage.quick else HOT)]
    rows.append(_padded(subject.model, ids, 128) if not stage.over else left_out(_PADDED, "", LOGITS, SKIPPED))
    if stage.over:
        rows.append(left_out(_OF_BF16, "x", BF16, SKIPPED))
    else:
        rows += _bf16(subject.model, ids[:, : 512 if stage.quick else 2048])
    prompt = ids.shape[1] - STEPS
    return Result("longctx-exact", rows, {"prompt_tokens": prompt, "decode_steps": STEPS}, [
        f"{subject.name}: {prompt} tokens of English prefilled in parts of {PREFILL} through the tiers, "
        f"{STEPS} teacher-forced steps, against one SDPA pass; disk tier only, pages of 16 tokens, lossless",
    ])  # fmt: skip


def _float32(model: Any, ids: torch.Tensor, hot: int) -> list[Row]:
    reference = full(model, ids)
    with tempfile.TemporaryDirectory() as folder:
        tiered, cache = through_tiers(model, ids, hot, host=None, disk=setup.on_disk(folder, 4))
        told = cache.ledger.snapshot()
        every = sum(layer.state.shape.numbers // layer.state.shape.tokens for layer in cache.tiered if layer.state) * 4
        share = cache.ledger.sizes["disk"] / (every * cache.get_seq_length())
        cache.close()
    found = likeness(reference, tiered)
    where = f"N={ids.shape[1]}, float32, disk"
    gib = told["bytes_cold_to_hot"] / 2**30
    return [
        one(f"max |difference of logits| to SDPA, {where}", "", found.worst, LOGITS, f"{len(found.kl)} steps"),
        _kl(found, where),
        one("  KL, the greatest of any step", "nat", float(found.kl.max())),
        one("  same most likely token", "", found.same_top1),
        one("share of the KV that lies on disk, at the end", "", share, COLD, f"hot_tokens={hot}, by the ledger"),
        one("  read from disk in all, prefill included", "GiB", gib),
    ]


def _kl(found: Likeness, where: str) -> Row:
    return Row(f"mean KL(SDPA || EXACT), {where}", "nat", stats.mean(found.kl.tolist()), KL)


def _padded(model: Any, ids: torch.Tensor, hot: int) -> Row:
    """Rows of 320, 253 and 200 tokens, and 8 steps."""
    width, steps = 320, 8
    batch, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width + steps, dtype=torch.long)
    for at, length in enumerate((width, 253, 200)):
        batch[at, width - length :] = ids[0, at * 50 : at * 50 + length]
        mask[at, width - length :] = 1
    more = torch.stack([ids[0, 400 + at : 400 + at + steps] for at in range(3)])
    everything = torch.cat([batch, more], 1)
    plain = _steps(model, everything, mask, DynamicCache(config=model.config), width)
    with attach(model, "exact", hot_tokens=hot) as attached:
        cache = attached.new_cache()
        tiered = _steps(model, everything, mask, cache, width)
        cold = min(layer.state.pages for layer in cache.tiered if layer.state)
        cache.close()
    worst = float((plain - tiered).abs().max())
    return one(_PADDED, "", worst, LOGITS, f"{width} tokens wide, {steps} steps, {cold} pages of a row cold")


@torch.no_grad()
def _steps(model: Any, ids: torch.Tensor, mask: torch.Tensor, cache: Any, prompt: int) -> torch.Tensor:
    """Logits behind the prompt and each token after it, [B, steps + 1, V]."""
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    found = []
    for start, stop in [(0, prompt), *((at, at + 1) for at in range(prompt, ids.shape[1]))]:
        answer = model(
            ids[:, start:stop],
            attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop],
            past_key_values=cache,
            logits_to_keep=1,
        )
        found.append(answer.logits.float())
    return torch.cat(found, 1)


def _bf16(model: Any, ids: torch.Tensor) -> list[Row]:
    """What rounding to bf16 costs EXACT, over what it costs SDPA: both against SDPA in float32."""
    reference = full(model, ids)
    rounded = setup.subject(torch.bfloat16).model
    plain = likeness(reference, one_at_a_time(rounded, ids))
    tiered, cache = through_tiers(rounded, ids, 160, host="4GiB", disk=None)
    cold = next(layer.state.pages for layer in cache.tiered if layer.state)
    cache.close()
    ours = likeness(reference, tiered)
    ratio = stats.ratio_of_paired_means(list(zip(ours.kl.tolist(), plain.kl.tolist(), strict=True)))
    where = f"N={ids.shape[1]}, {len(ours.kl)} steps, {cold} cold pages"
    return [
        Row(_OF_BF16, "x", ratio, BF16, where),
        Row("  mean KL, EXACT", "nat", stats.mean(ours.kl.tolist())),
        Row("  mean KL, SDPA", "nat", stats.mean(plain.kl.tolist())),
    ]


@torch.no_grad()
def full(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of one SDPA pass behind the last `STEPS` + 1 tokens but the very last: [STEPS + 1, V] float32."""
    found: torch.Tensor = model(ids, use_cache=False, logits_to_keep=STEPS + 1).logits
    return found[0].float()


@torch.no_grad()
def one_at_a_time(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The same with SDPA's cache: a pass over the prompt, then single tokens."""
    return _behind(model, ids, DynamicCache(config=model.config))


@torch.no_grad()
def through_tiers(model: Any, ids: torch.Tensor, hot: int, **tiers: Any) -> tuple[torch.Tensor, TieredCache]:
    """The same with EXACT; and its cache, which the caller closes."""
    with attach(model, "exact", hot_tokens=hot, prefill_tokens=PREFILL, **tiers) as attached:
        cache = attached.new_cache()
        attached.prefill(ids[:, :-STEPS], cache)
        found = _behind(model, ids, cache)
        cache.measure()
    return found, cache


def _behind(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    found = []
    ends = [ids.shape[1] - STEPS, *range(ids.shape[1] - STEPS + 1, ids.shape[1] + 1)]
    for end in ends:
        start = cache.get_seq_length()
        found.append(model(ids[:, start:end], past_key_values=cache, logits_to_keep=1).logits[0, -1:].float())
    return torch.cat(found)
