"""One generation from end to end at 64K tokens with 2K of them hot: that it ends, in what time, and in how much memory.

The model has random weights, so that two cores can compute such a prompt: times and bytes mean what they say, tokens
mean nothing. Memory is this process's peak beyond what it had with the model loaded; host memory's share of the cold
pages is part of that.
"""

from __future__ import annotations

import mmap
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lab.bench.longctx import setup
from lab.bench.longctx.setup import one
from lab.bench.longctx.stage import Stage
from lab.bench.report import Result, Row, Target
from stepwell.demo.results import stats
from stepwell.longctx import TieredCache, attach
from stepwell.longctx.ledger import Ledger

TOKENS, QUICK_TOKENS, HOT, NEW = 65_536, 6_144, 2048, 32
AT_LEAST, AT_MOST_HOT = Target(">=", 65_536), Target("<=", 2048)
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4096}  # fmt: skip
TOKEN_BYTES = 4 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * 2 * SHAPE["head_dim"]
"""K and V of a token in all layers, in float32."""
_EVERY_S = 0.005


def run(stage: Stage) -> Result:
    tokens = QUICK_TOKENS if stage.quick else TOKENS
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, max_position_embeddings=2 * TOKENS, eos_token_id=None, pad_token_id=0)
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(1, SHAPE["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(8))
    host = TOKEN_BYTES * tokens // 16
    with tempfile.TemporaryDirectory() as folder:
        peak = Peak()
        with attach(model, "stepwell", hot_tokens=HOT, host=host, disk=setup.on_disk(folder, 4)) as attached:
            cache = attached.new_cache()
            clock = Clock(cache)
            answer = model.generate(ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False, streamer=clock)
            cache.close()
        grown = peak.close()
    made = int(answer.shape[1]) - tokens
    rows = [*_rows(tokens, made, clock, cache.ledger), _memory(grown, tokens, host)]
    layers, wide = SHAPE["num_hidden_layers"], SHAPE["hidden_size"]
    return Result("longctx-beyond", rows, {"prompt_tokens": tokens, "generated_tokens": made}, [
        f"random weights (tokens mean nothing): a Llama of {layers} layers, {wide} wide, float32; policy 'stepwell', "
        f"hot_tokens={HOT}, {host >> 20} MiB of host memory, the rest on disk",
    ])  # fmt: skip


def _rows(tokens: int, made: int, clock: Clock, ledger: Ledger) -> list[Row]:
    waited = clock.times[0] - clock.began
    steps = [later - sooner for sooner, later in pairwise(clock.times)]
    told, selected = ledger.snapshot(), max(1, ledger.pages["selected"])
    return [
        one("tokens of context of a generation that ended", "", tokens + made, AT_LEAST, f"{made} of them generated"),
        one("  time to the first token", "s", waited, None, f"{1e3 * waited / tokens:.2f} ms a token of the prompt"),
        Row("  a decode step, median", "ms", stats.median(steps).times(1e3)),
        one("hot tokens in a layer, the most behind any token", "", clock.hot, AT_MOST_HOT, f"hot_tokens={HOT}"),
        _bytes("  in host memory", told["host_bytes"]),
        _bytes("  on disk", told["disk_bytes"], "K8V4 pages, sealed"),
        _bytes("  hot: tail, sinks and pool", told["hot_bytes"]),
        _bytes("  key index", told["index_bytes"]),
        _bytes("  brought up in all", told["bytes_cold_to_hot"], "lossless pages for the prompt's parts, mostly"),
        one("  brought up by a decode step", "KiB", ledger.cold_to_hot("draft") / max(1, len(steps)) / 1024),
        one("  hits of the pool", "", ledger.pages["hits"] / selected),
    ]


def _bytes(what: str, count: Any, beside: str = "") -> Row:
    return one(what, "MiB", count / 2**20, None, beside)


def _memory(grown: int, tokens: int, host: int) -> Row:
    """Beside what all of its KV would take alone."""
    whole = TOKEN_BYTES * tokens
    beside = f"all of the KV is {whole >> 20} MiB, host memory's part of it {host >> 20}"
    return one("peak of memory beyond the loaded model", "MiB", grown / 2**20, None, beside)


class Clock:
    """A streamer that notes when each token came, and the greatest number of hot tokens that a layer had then."""

    def __init__(self, cache: TieredCache) -> None:
        self.began = time.perf_counter()
        self.times: list[float] = []
        self.hot = 0
        self._cache = cache

    def put(self, value: torch.Tensor) -> None:
        if value.dim() == 1:  # the prompt, which is put first, has rows
            self.times.append(time.perf_counter())
            self.hot = max(self.hot, hot_tokens(self._cache))

    def end(self) -> None:
        """Nothing is held back."""


def hot_tokens(cache: TieredCache) -> int:
    """Of the layer that has most: sinks, tail, and pages, those that its pool holds and those that are on their way to
    the next step, in the fullest lane."""
    found = 0
    for state in (layer.state for layer in cache.tiered if layer.state is not None):
        sinks = state.sinks[0].shape[2] if state.sinks is not None else 0
        pages = int((state.pool.pages >= 0).sum(1).max()) if state.pool is not None else 0
        pages += sum(int(brought.wanted.sum(1).max()) for brought in state.ahead.fetches)
        found = max(found, sinks + len(state.tail) + pages * state.shape.tokens)
    return found


class Peak:
    """The greatest resident size of this process since it was made, looked at every few milliseconds."""

    def __init__(self) -> None:
        self._before = self._most = _resident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(_EVERY_S):
            self._most = max(self._most, _resident())

    def close(self) -> int:
        """Bytes more than at the beginning."""
        self._over.set()
        self._thread.join()
        return max(self._most, _resident()) - self._before


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
