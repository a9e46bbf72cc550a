"""The Triton kernel that copies pieces between host memory and pages: some of a GPU's processors read and write pinned
memory over the bus, which a copy engine does more slowly where pieces are short.

Compiled on first use. It also runs in Triton's interpreter (TRITON_INTERPRET=1), on a CPU's memory.
"""

from __future__ import annotations

import functools
from typing import Any

WORD = 8
"""Bytes that are moved at a time: addresses and sizes must be multiples of it."""

TILE_BYTES = 16 << 10
"""Bytes that one program takes at a time. Pieces are cut into tiles, so that pieces of any size keep all programs
busy."""

PROGRAMS = 16
"""Programs that run at a time. A few keep the bus full and leave the other processors to the engine."""


@functools.cache
def copy_kernel() -> Any:
    """The kernel; launched by `launch`. Raises ImportError without Triton."""
    import triton
    import triton.language as tl

    # Numbers and tables are whatever they are: a kernel for each kind of them would be compiled while requests wait.
    @triton.jit(do_not_specialize=["sources", "targets", "sizes", "tiles", "most"])
    def copy_pieces(sources, targets, sizes, tiles, most, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
        """Copies pieces, each in `most` tiles of WORDS words, of which the last may be short or empty."""
        number = tl.program_id(0)
        lanes = tl.arange(0, WORDS)
        while number < tiles:
            piece = number // most
            words = tl.load(sizes + piece) // 8
            at = (number % most) * WORDS + lanes
            source = tl.load(sources + piece).to(tl.pointer_type(tl.int64))
            target = tl.load(targets + piece).to(tl.pointer_type(tl.int64))
            inside = at < words
            tl.store(target + at, tl.load(source + at, mask=inside, other=0), mask=inside)
            number += tl.num_programs(0)

    return copy_pieces


def launch(sources: Any, targets: Any, sizes: Any, longest: int) -> None:
    """Copies sizes[i] bytes from address sources[i] to targets[i]: int64 tensors on the device, on whose current stream
    it runs. `longest`: the largest of the sizes. All are multiples of WORD."""
    most = -(-longest // TILE_BYTES)
    tiles = most * len(sizes)
    if tiles:
        grid = (min(PROGRAMS, tiles),)
        copy_kernel()[grid](sources, targets, sizes, tiles, most, WORDS=TILE_BYTES // WORD)
