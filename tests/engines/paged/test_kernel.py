"""The Triton kernel, in Triton's interpreter, on this processor's memory: each byte to its place and no other."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="pages are torch's tensors")
pytest.importorskip("triton", reason="the kernel is Triton's")

import torch

from stepwell.engines.paged.gpu import kernel


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel is interpreted if this holds when it is made."""
    import triton

    kernel.copy_kernel.cache_clear()
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    yield
    kernel.copy_kernel.cache_clear()


def copied(sizes: list[int], seed: int) -> None:
    """Pieces at any word of a source, to any word of a target, without two that overlap."""
    rng = random.Random(seed)
    room = max(sizes) + 16
    source = torch.randint(0, 256, (len(sizes) * room,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    expected = target.clone()
    order = rng.sample(range(len(sizes)), len(sizes))
    table = torch.zeros(3, len(sizes), dtype=torch.int64)
    for piece, (size, place) in enumerate(zip(sizes, order, strict=True)):
        here, there = piece * room + 8 * rng.randrange(2), place * room + 8 * rng.randrange(2)
        table[:, piece] = torch.tensor([source.data_ptr() + here, target.data_ptr() + there, size])
        expected[there : there + size] = source[here : here + size]
    kernel.launch(*table, max(sizes))
    assert torch.equal(target, expected)


@pytest.mark.parametrize("words", [1, 3, 2047, 2048, 2049, 6000])
def test_pieces_of_one_size(words: int) -> None:
    copied([8 * words] * 5, seed=words)


def test_pieces_of_different_sizes() -> None:
    """Layers may differ, and the last tile of a piece is short."""
    copied([8, kernel.TILE_BYTES, kernel.TILE_BYTES + 8, 24, 3 * kernel.TILE_BYTES - 8, 4096], seed=1)


def test_more_tiles_than_programs_and_none_at_all() -> None:
    copied([kernel.TILE_BYTES + 8] * (kernel.PROGRAMS + 3), seed=2)
    kernel.launch(*torch.zeros(3, 0, dtype=torch.int64), 0)


def test_importing_it_needs_no_triton() -> None:
    """What an engine process loads stays light; where there is no Triton the copy engine does everything."""
    code = "import sys; import stepwell.engines.paged.gpu.method; assert not {'triton', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "TRITON_INTERPRET": ""}, timeout=120)


@pytest.mark.parametrize("generation", [80, 90, 100])
def test_it_compiles_for_gpus(monkeypatch: pytest.MonkeyPatch, generation: int) -> None:
    """To machine code, by the compiler that Triton brings along; that needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    kernel.copy_kernel.cache_clear()
    table, constants = "*i64", {"WORDS": kernel.TILE_BYTES // kernel.WORD}
    signature = {**dict.fromkeys(("sources", "targets", "sizes"), table), "tiles": "i32", "most": "i32"}
    source = ASTSource(fn=kernel.copy_kernel(), signature={**signature, "WORDS": "constexpr"}, constexprs=constants)
    try:
        made = triton.compile(source, target=GPUTarget("cuda", generation, 32))
    except RuntimeError as error:
        if "ptxas" in str(error):
            pytest.skip("this Triton has no compiler for GPUs")
        raise
    assert len(made.asm["cubin"]) > 1000
