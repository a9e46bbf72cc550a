"""Keeps the KV blocks of a library that computes them itself: what a prompt shares with earlier ones is not computed
again. `python examples/library.py` runs it, with numbers in place of a model."""

from __future__ import annotations

import numpy as np

import stepwell

MODEL = stepwell.KvModel(
    name="example-8b",
    fingerprint="sha256:0f3c; rope=1e6; kv=float16",  # of the weights' files, and of all settings that shape the KV
    block_shape=(4, 2, 64, 8, 64),  # layers, K and V, tokens of a block, heads, numbers of a head
    dtype="float16",
    block_tokens=64,
)


def compute(tokens: list[int], first: int) -> np.ndarray:
    """A model's prefill: KV of the blocks from number `first` on."""
    blocks = len(tokens) // MODEL.block_tokens - first
    return np.random.default_rng(first).random((blocks, *MODEL.block_shape), np.float32).astype(np.float16)


def prefill(cache: stepwell.BlockClient, tokens: list[int]) -> np.ndarray:
    """KV of all full blocks of a prompt."""
    kv = np.empty((len(tokens) // MODEL.block_tokens, *MODEL.block_shape), np.float16)
    found = cache.get(tokens, kv)
    if found.blocks < found.asked:  # why is in found.reason; it is computed, whatever it is
        kv[found.blocks :] = compute(tokens, found.blocks)
        cache.put(tokens, kv[found.blocks :], first=found.blocks)
    print(f"{found.blocks} of {found.asked} blocks were there {found.reason}")
    return kv


if __name__ == "__main__":
    system = list(range(640))
    with stepwell.open(MODEL, host="256MiB") as cache:  # or home="...", for the well that runs
        first = prefill(cache, system + [1] * 128)
        second = prefill(cache, system + [2] * 128)
    assert (first[:10].view(np.uint16) == second[:10].view(np.uint16)).all()
