"""Where the pages of each layer lie: an engine's KV tensors as rows of bytes, whatever their order in memory.

vLLM gives each layer as a view [pages, heads, tokens, content] of one buffer, in one of several physical orders. A page
of a layer must be one run of bytes (LBHNC, LBNHC, BLHNC, BLNHC); the pages of a layer are evenly spaced, and may be
padded, or lie between other layers'. Layers may share their KV, and those of several cache groups their memory: each
run is taken once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from stepwell.errors import Unsupported


@dataclass(frozen=True, slots=True)
class Row:
    """One layer's pages: page p is the `nbytes` from `address + p * stride` on, in the buffer that begins at `buffer`.
    `kind`: its numbers ("bfloat16"). `split`: its bytes as (outer, K or V, inner)."""

    buffer: int
    address: int
    stride: int
    nbytes: int
    kind: str
    split: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring rows whose pages are one run: `nbytes` from `address + p * stride` on, `offset` into a page."""

    buffer: int
    address: int
    stride: int
    nbytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class LayerStack:
    """`count` spans of one size and buffer, each `step` bytes after the one before: a page's layers."""

    first: Span
    count: int
    step: int


@dataclass(frozen=True, slots=True)
class Pool:
    """Pages of all layers. In a slot a page's layers follow each other in the order of `rows`."""

    num_pages: int
    rows: tuple[Row, ...]

    @property
    def page_bytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    @property
    def spans(self) -> tuple[Span, ...]:
        """As few runs as the layout allows: one where all layers of a page lie side by side."""
        spans: list[Span] = []
        offset = 0
        for row in self.rows:
            last = spans[-1] if spans else None
            here = (row.buffer, row.address, row.stride)
            beside = last is not None and (last.buffer, last.address + last.nbytes, last.stride) == here
            if last is not None and beside and last.nbytes + row.nbytes <= row.stride:
                spans[-1] = Span(last.buffer, last.address, last.stride, last.nbytes + row.nbytes, last.offset)
            else:
                spans.append(Span(*here, row.nbytes, offset))
            offset += row.nbytes
        return tuple(spans)


def stacks(spans: Sequence[Span]) -> Iterator[LayerStack]:
    """All spans in order, as few stacks as they make."""
    at = 0
    while at < len(spans):
        first, count, step = spans[at], 1, 0
        for last, more in pairwise(spans[at:]):
            apart = more.address - last.address
            alike = (more.buffer, more.nbytes, more.stride) == (first.buffer, first.nbytes, first.stride)
            if not alike or apart < first.nbytes or apart != (step or apart):
                break
            count, step = count + 1, apart
        yield LayerStack(first, count, step or first.nbytes)
        at += count


def pool_of(kv_caches: Mapping[str, Any], num_pages: int) -> Pool:
    """The pool of these tensors, by layer. Raises Unsupported SW-707 for a layer whose pages are not one run of bytes
    each, or not `num_pages`, or that overlap with others otherwise than from their first byte on."""
    rows: dict[int, Row] = {}
    for name, tensor in kv_caches.items():
        row = _row(name, tensor, num_pages)
        known = rows.setdefault(row.address, row)
        if known.stride != row.stride:
            raise _odd(name, f"its pages share their memory with others that are {known.stride} bytes apart")
        if known.nbytes < row.nbytes:
            rows[row.address] = row
    for one, other in pairwise(sorted(rows.values(), key=lambda row: row.address)):
        if one.buffer == other.buffer and one.address + one.nbytes > other.address:
            raise _odd("of several groups", "its pages overlap with others in part")
    return Pool(num_pages, tuple(rows.values()))


def idle_bytes(kv_caches: Mapping[str, Any], num_pages: int, layers: Collection[str]) -> list[slice]:
    """The bytes of a page, as it lies in a slot, in which none of these layers keeps anything. Raises as `pool_of`."""
    used: dict[int, int] = {}
    for row in (_row(name, tensor, num_pages) for name, tensor in kv_caches.items() if name in layers):
        used[row.address] = max(used.get(row.address, 0), row.nbytes)
    idle, at = [], 0
    for row in pool_of(kv_caches, num_pages).rows:
        if (first := used.get(row.address, 0)) < row.nbytes:
            idle.append(slice(at + first, at + row.nbytes))
        at += row.nbytes
    return idle


def _row(name: str, tensor: Any, num_pages: int) -> Row:
    shape, strides, size = tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size()
    pieces = shape[0] // num_pages if num_pages and shape[0] % num_pages == 0 else 0  # kernel blocks in a page
    piece = int(np.prod(shape[1:]))
    if len(shape) < 2 or not pieces or not _dense(shape[1:], strides[1:]) or (pieces > 1 and strides[0] != piece):
        raise _odd(name, f"shape {shape}, stride {strides}: not {num_pages} pages of one run of bytes each")
    if tensor.device.type == "cpu" and len(shape) == 4:  # packed for the processor: of each head all of K, then of V
        split = (pieces * shape[1], 2, -1)
    else:  # of each head and token
        split = (-1, 2, shape[-1] * size // 2)
    kind = str(tensor.dtype).removeprefix("torch.")
    buffer = tensor.untyped_storage().data_ptr()
    return Row(buffer, tensor.data_ptr(), pieces * strides[0] * size, pieces * piece * size, kind, split)


def _odd(name: str, why: str) -> Unsupported:
    return Unsupported(
        "SW-707",
        what=f"the KV cache of layer {name} cannot be copied",
        why=why,
        fix="use a layout whose pages are compact (VLLM_KV_CACHE_LAYOUT=LBHNC), or report this one to the project",
    )


def _dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """The elements are one run, in whatever order of dimensions."""
    run = 1
    for stride, count in sorted((s, n) for n, s in zip(shape, strides, strict=True) if n != 1):
        if stride != run:
            return False
        run *= count
    return True
