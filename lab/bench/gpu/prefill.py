"""What computing a prompt takes: the model's chunked prefill over pages, alone on the device."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lab.bench.gpu import card
from lab.bench.gpu.engine.kv import Kv
from lab.bench.gpu.engine.model import Config, Llama
from lab.bench.gpu.stage import Lap, Stage
from stepwell.policies.costs.prefill import pairs


@dataclass(frozen=True, slots=True)
class Prefills:
    """By length: seconds, without those of copying pages together, which an engine with paged attention does not do;
    the share of these; joules."""

    seconds: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    gathering: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    joules: dict[int, float] = field(default_factory=dict)


def flops(config: Config, tokens: int) -> float:
    """Multiplications and additions of a prompt, its last token's vocabulary aside."""
    linear = 2.0 * (config.parameters - 2 * config.vocabulary * config.width) * tokens
    return linear + 4.0 * config.layers * config.heads * config.head * pairs(tokens, 0)


@torch.inference_mode()
def prefills(stage: Stage, kv: Kv, lengths: Sequence[int], chunk: int, passes: Sequence[int]) -> Prefills:
    """Prompts of these lengths, multiples of `chunk`. Each pass goes as far as it says: shorter prompts are the
    beginnings of longer ones. Ends early when the time is over."""
    found = Prefills()
    model = Llama(stage.model, kv.layers)
    source = random.Random(7)
    tokens = [source.randrange(stage.model.vocabulary) for _ in range(max(passes))]
    pages = list(range(1, -(-len(tokens) // kv.shape.page) + 1))
    for start in (0, chunk):  # with and without a context
        model.prefill(tokens[start : start + chunk] or tokens[:chunk], start, pages)
    stage.wait()
    for most in passes:
        computed = gathered = 0.0
        used = card.joules()
        for start in range(0, most, chunk):
            if stage.over:
                return found
            lap = Lap(stage)
            model.prefill(tokens[start : start + chunk], start, pages)
            computed += lap.seconds()
            if start:
                lap = Lap(stage)
                model.gather(start, pages)
                gathered += lap.seconds()
            if (length := start + chunk) in lengths:
                found.seconds[length].append(computed - gathered)
                found.gathering[length].append(gathered / computed)
                if used is not None and length not in found.joules:
                    found.joules[length] = (card.joules() or used) - used
    return found
