"""Where the pages of each layout lie, and that runs and pieces move each of their bytes once, to its place."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="pages are torch's tensors")

import torch

from stepwell.client.worker import Slot
from stepwell.engines.paged.base import Shard
from stepwell.engines.paged.cpu import open_cpu
from stepwell.engines.paged.pool import Pool, Span, idle_bytes, pool_of, stacks
from stepwell.engines.paged.runs import Places, pieces, places, runs
from stepwell.errors import Unsupported

LAYERS, PAGES, HEADS, TOKENS, CONTENT = 3, 8, 2, 4, 6
LETTERS = {"L": LAYERS, "B": PAGES, "H": HEADS, "N": TOKENS, "C": CONTENT}
COMPACT, OTHERS = ["LBHNC", "LBNHC", "BLHNC", "BLNHC"], ["LHBNC", "BHLNC"]


def caches(order: str, dtype: torch.dtype = torch.int16, padding: int = 0) -> dict[str, torch.Tensor]:
    """Views [pages, heads, tokens, content] of one buffer, in a physical order. `padding`: elements behind a page."""
    strides, size = {}, 1
    for letter in reversed(order):
        strides[letter] = size
        size *= LETTERS[letter]
        if letter in "LB" and order.index(letter) == 1:
            size += padding
    whole = torch.zeros(size, dtype=dtype)
    shape = (PAGES, HEADS, TOKENS, CONTENT)
    at = tuple(strides[letter] for letter in "BHNC")
    return {str(layer): whole.as_strided(shape, at, layer * strides["L"]) for layer in range(LAYERS)}


def fill(tensors: dict[str, torch.Tensor]) -> None:
    for n, tensor in enumerate(tensors.values()):
        tensor.copy_((torch.arange(tensor.numel()).reshape(tensor.shape) + 1000 * n).to(tensor.dtype))


@pytest.mark.parametrize("order", COMPACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8], ids=str)
def test_the_pages_of_each_layout(order: str, dtype: torch.dtype) -> None:
    tensors = caches(order, dtype)
    pool = pool_of(tensors, PAGES)
    assert pool.page_bytes == LAYERS * HEADS * TOKENS * CONTENT * dtype.itemsize
    assert len(pool.spans) == (1 if order.startswith("B") else LAYERS), "layers side by side are one run"
    assert [row.kind for row in pool.rows] == [str(dtype).removeprefix("torch.")] * LAYERS


@pytest.mark.parametrize("order", OTHERS)
def test_pages_that_are_scattered_are_refused(order: str) -> None:
    with pytest.raises(Unsupported, match="one run of bytes") as refused:
        pool_of(caches(order), PAGES)
    assert refused.value.code == "SW-707"
    with pytest.raises(Unsupported):
        pool_of(caches("LBHNC"), PAGES - 1)


def test_padding_is_not_copied() -> None:
    pool = pool_of(caches("LBHNC", padding=0), PAGES)
    padded = pool_of({"a": torch.zeros(PAGES, 64)[:, :48].reshape(PAGES, 1, 48)[:, :, :]}, PAGES)
    assert pool.rows[0].stride == pool.rows[0].nbytes
    assert (padded.rows[0].stride, padded.rows[0].nbytes) == (64 * 4, 48 * 4)


def test_pages_of_several_kernel_blocks() -> None:
    """A backend may divide vLLM's pages: its tensor has more of them, and they lie side by side."""
    pool = pool_of({"a": torch.zeros(PAGES * 4, 2, 3)}, PAGES)
    assert pool.rows[0].nbytes == pool.rows[0].stride == 4 * 2 * 3 * 4
    with pytest.raises(Unsupported):
        pool_of({"a": torch.zeros(PAGES * 4, 8)[:, :6]}, PAGES)


def test_of_layers_that_share_memory_the_largest_are_copied() -> None:
    whole = torch.zeros(PAGES, 64)
    for shared in ({"a": whole, "b": whole[:, :48]}, {"a": whole[:, :48], "b": whole.reshape(PAGES, 2, 32)}):
        (row,) = pool_of(shared, PAGES).rows
        assert row.nbytes == 256


def test_layers_that_overlap_otherwise_are_refused() -> None:
    flat = torch.zeros(PAGES * 64 + 32)
    whole = flat[: PAGES * 64].reshape(PAGES, 64)
    odd = {"in part": flat[32 : PAGES * 64 + 32].reshape(PAGES, 64), "apart": flat[: PAGES * 32].reshape(PAGES, 32)}
    for what, tensor in odd.items():
        with pytest.raises(Unsupported) as refused:
            pool_of({"a": whole, "b": tensor}, PAGES)
        assert refused.value.code == "SW-707" and ("overlap" in refused.value.why) is (what == "in part")


def test_bytes_of_a_page_that_a_group_leaves_alone() -> None:
    layers = torch.zeros(3, PAGES, 16)
    caches = {"a": layers[0], "b": layers[1], "c": layers[2], "d": layers[1]}
    assert idle_bytes(caches, PAGES, {"a", "b", "c"}) == []
    assert idle_bytes(caches, PAGES, {"d"}) == [slice(0, 64), slice(128, 192)]
    assert idle_bytes({**caches, "e": layers[1][:, :4]}, PAGES, {"e", "a"}) == [slice(80, 128), slice(128, 192)]


def test_layers_that_share_their_kv_are_copied_once() -> None:
    tensor = torch.zeros(PAGES, 6)
    assert len(pool_of({"a": tensor, "b": tensor}, PAGES).rows) == 1


def by_hand(tensors: dict[str, torch.Tensor], pages: Sequence[int]) -> bytes:
    """What a slot must hold: page by page, layer by layer, in the order of memory."""
    out = b""
    for page in pages:
        for tensor in tensors.values():
            one = tensor[page]
            dense = one.permute(sorted(range(3), key=lambda d: -one.stride(d)))
            out += dense.contiguous().view(torch.uint8).numpy().tobytes()
    return out


def move(source: int, target: int, size: int) -> None:
    ctypes.memmove(target, source, size)


def by_runs(where: Places, pool: Pool) -> None:
    for run in runs(where, pool):
        for n in range(run.height):
            move(run.device + n * run.device_pitch, run.host + n * run.host_pitch, run.width)


def by_pieces(where: Places, pool: Pool) -> None:
    for host, device, size in pieces(where, pool).T.tolist():
        move(device, host, size)


@st.composite
def plans(draw: st.DrawFn) -> tuple[str, int, list[tuple[int, int, list[int]]]]:
    """A layout, pages in a block, and (slot, skip, pages): in order, every second, descending, or any."""
    per_block = draw(st.integers(1, 3))
    order = draw(
        st.sampled_from([list(range(PAGES)), list(range(0, PAGES, 2)), list(range(PAGES - 1, -1, -1))])
        | st.permutations(range(PAGES))
    )
    blocks, at = [], 0
    for slot in draw(st.permutations(range(4))):
        skip = draw(st.integers(0, per_block - 1))
        blocks.append((slot, skip, order[at : at + per_block - skip]))
        at += per_block - skip
    return draw(st.sampled_from(COMPACT)), per_block, blocks


@given(plans())
def test_each_byte_gets_to_its_place(plan: tuple[str, int, list[tuple[int, int, list[int]]]]) -> None:
    order, per_block, blocks = plan
    tensors = caches(order)
    fill(tensors)
    pool = pool_of(tensors, PAGES)
    expected = np.full((4, per_block * pool.page_bytes), 7, np.uint8)
    for slot, skip, pages in blocks:
        raw = by_hand(tensors, pages)
        expected[slot, skip * pool.page_bytes :][: len(raw)] = np.frombuffer(raw, np.uint8)
    for way in (by_runs, by_pieces):
        slots = np.full_like(expected, 7)
        way(places([Shard(Slot(slots, slot), skip, pages) for slot, skip, pages in blocks], pool.page_bytes), pool)
        assert np.array_equal(slots, expected)


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("order", COMPACT)
def test_the_processor_copies_each_layout(order: str, padding: int) -> None:
    tensors = caches(order, padding=padding)
    fill(tensors)
    copies = open_cpu(tensors, PAGES)
    slots = np.zeros((2, 2 * copies.page_bytes), np.uint8)
    shards = [Shard(Slot(slots, 0), 0, [5, 2]), Shard(Slot(slots, 1), 0, [7, 1])]
    copies.gather(shards, copies.now()).wait()
    assert slots.tobytes() == by_hand(tensors, [5, 2, 7, 1])
    assert copies.fetch([2, 7], copies.now()).bytes.tobytes() == by_hand(tensors, [2, 7])
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()
    copies.scatter(shards, copies.now()).wait()
    for name, tensor in tensors.items():
        assert torch.equal(tensor[[1, 2, 5, 7]], before[name][[1, 2, 5, 7]]) and not tensor[[0, 3, 4, 6]].any()


@pytest.mark.parametrize(
    ("pages", "apart", "beside"),
    [
        ([0, 1, 2, 3], LAYERS, 1),
        ([0, 2, 4, 6], LAYERS, 1),
        ([7, 6, 5, 4], 4, 4),  # as vLLM gives out what it freed: page by page, all layers of one at once
        ([0, 1, 5, 6], 4, 2),
        ([3], 1, 1),
        ([], 0, 0),
    ],
    ids=str,
)
def test_evenly_spaced_pages_or_layers_are_one_call(pages: list[int], apart: int, beside: int) -> None:
    for order, calls in (("LBHNC", apart), ("BLHNC", beside)):
        tensors: Any = caches(order)
        pool = pool_of(tensors, PAGES)
        slots = np.zeros((1, max(1, len(pages)) * pool.page_bytes), np.uint8)
        found = list(runs(places([Shard(Slot(slots, 0), 0, pages)], pool.page_bytes), pool))
        assert len(found) == calls
        assert all(run.width <= min(run.host_pitch, run.device_pitch) for run in found)


def test_layers_that_differ_or_lie_anywhere_are_taken_one_by_one() -> None:
    whole = torch.zeros(100, 64, dtype=torch.uint8)
    layers = [whole[10:18, :16], whole[30:38, :16], whole[50:58, :16], whole[60:68, :24], whole[90:98, :24]]
    pool = pool_of({str(n): layer for n, layer in enumerate(layers)}, 8)
    assert [(stack.count, stack.step) for stack in stacks(pool.spans)] == [(3, 20 * 64), (2, 30 * 64)]
    fallen = pool_of({str(n): layer for n, layer in enumerate(reversed(layers))}, 8)
    assert [stack.count for stack in stacks(fallen.spans)] == [1] * 5


def test_no_call_is_of_several_buffers() -> None:
    """Which may lie evenly apart, as it happens."""
    spans = [Span(buffer, 1000 * n, 64, 16, 16 * n) for n, buffer in enumerate((7, 7, 8, 8, 8))]
    assert [stack.count for stack in stacks(spans)] == [2, 3]


def test_no_call_is_of_several_slabs() -> None:
    """Each is registered by itself, and the runtime refuses a range that is not of one registration."""
    pool = pool_of(caches("BLHNC"), PAGES)
    whole = np.zeros((6, pool.page_bytes), np.uint8)
    slabs = [whole[:2], whole[2:4], whole[4:]]  # side by side, or evenly apart, as it may happen
    shards = [Shard(Slot(slabs[n // 2], n % 2), 0, [n]) for n in range(6)]
    assert [run.height for run in runs(places(shards, pool.page_bytes), pool)] == [2, 2, 2]
    assert [run.height for run in runs(places(shards[::2], pool.page_bytes), pool)] == [1, 1, 1]


def test_pitches_that_a_copy_engine_refuses_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(caches("LBHNC"), PAGES)
    slots = np.zeros((1, 3 * pool.page_bytes), np.uint8)
    where = places([Shard(Slot(slots, 0), 0, [0, 3, 6])], pool.page_bytes)
    monkeypatch.setattr("stepwell.engines.paged.runs.LONGEST_PITCH", 2 * pool.rows[0].stride)
    assert len(list(runs(where, pool))) == 3 * LAYERS
