"""Engines for tests: tiny KV, both halves on the test's well."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.bench.gpu.engine.compute import Hashes, Tokens
from lab.bench.gpu.engine.halves import open_halves
from lab.bench.gpu.engine.kv import Kv, Layout, Shape
from lab.bench.gpu.engine.model import TINY
from lab.bench.gpu.engine.serving import Engine, Live
from stepwell.engines.paged.base import Copies

PAGE, BLOCK, VOCABULARY = 16, 32, 500


def prompts(count: int, seed: int = 1, least: int = 50, most: int = 400) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(VOCABULARY) for _ in range(dice.randrange(least, most))] for _ in range(count)]


@contextmanager
def hashing(
    home: Path,
    device: str,
    *,
    pages: int = 64,
    layout: Layout = Layout.BLHNC,
    model: str = "m",
    copies: Copies | None = None,
    kv: Kv | None = None,
    **engine: Any,
) -> Iterator[tuple[Engine, Hashes]]:
    """KV that tells of which prefix it is, and pages that are poisoned when they are taken."""
    kv = kv or Kv.make(Shape(2, pages, 2, PAGE, 32), layout, device)
    compute = Hashes(kv, VOCABULARY)
    with open_halves(home, kv, block_tokens=BLOCK, model=model, copies=copies) as halves:
        halves.wait_ready()
        yield Engine(kv, halves, compute, **{"budget": 100, "poisoned": True, **engine}), compute
        assert halves.told == []


@contextmanager
def modelled(home: Path, device: str, *, layout: Layout, ahead: bool) -> Iterator[Engine]:
    """A tiny model; flash kernels for GPUs take no float32."""
    dtype = "float32" if device == "cpu" else "bfloat16"
    kv = Kv.make(TINY.kv(64, PAGE, dtype), layout, device)
    compute = Tokens(TINY, kv, batch=4, pages=32)
    with open_halves(home, kv, block_tokens=BLOCK, model=f"{layout.value}{ahead}") as halves:
        halves.wait_ready()
        yield Engine(kv, halves, compute, ahead=ahead, budget=128, poisoned=True)
        assert halves.told == []


def recalled(live: Live) -> int:
    return int(live.receipt["recalled_tokens"])


def whole_blocks(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


def served_by_recall(engine: Engine, prompt: list[int], answer: int) -> Live:
    """What only the well remembers; asked again where this machine dallied: a late recall is given up, and pages
    are held for their slots for so long only."""
    for _ in range(6):
        engine.pool.forget()
        live = engine.serve(prompt, answer)
        if recalled(live) == whole_blocks(len(prompt)):
            break
    return live
