"""Codecs: what comes back, how near it is, and how many bytes it takes."""

from __future__ import annotations

import itertools

import pytest
import torch

from stepwell.errors import ConfigError
from stepwell.longctx.parts.codec.base import CodecKind
from stepwell.longctx.parts.codec.plain import Half, Plain
from stepwell.longctx.parts.codec.quantised import Quantised
from stepwell.longctx.parts.numbers import half_above, half_below, pack, packed_width, unpack
from stepwell.longctx.shape import PageShape

SHAPES = [
    PageShape(heads=3, group=3, tokens=16, key_dim=64, value_dim=64),
    PageShape(heads=1, group=1, tokens=1, key_dim=8, value_dim=16),
    PageShape(heads=2, group=4, tokens=5, key_dim=13, value_dim=7),
]
KINDS: list[CodecKind] = [
    Plain(),
    Half(),
    Quantised(8, 4),
    Quantised(4, 4),
    Quantised(2, 2),
    Quantised(8, 8),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def kv(shape: PageShape, dtype: torch.dtype, pages: int = 3, size: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(5)
    rows = (pages, shape.heads, shape.tokens)
    keys = torch.randn(*rows, shape.key_dim, generator=chance) * size
    keys[..., 0] *= 20.0  # keys have outlier channels
    return keys.to(dtype), (torch.randn(*rows, shape.value_dim, generator=chance) * size).to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize(
    "kind, shape, dtype", list(itertools.product(KINDS, SHAPES, DTYPES)), ids=lambda at: str(at).replace("torch.", "")
)
def test_every_codec(kind: CodecKind, shape: PageShape, dtype: torch.dtype) -> None:
    codec = kind.build(shape, dtype)
    keys, values = kv(shape, dtype)
    payload = codec.encode(keys, values)
    assert payload.shape == (3, codec.page_bytes) and payload.dtype == torch.uint8
    back = codec.decode(payload)
    for came, went in zip(back, (keys, values), strict=True):
        assert came.shape == went.shape and came.dtype == dtype
        assert came.isfinite().all()
        assert not codec.lossless or same(came, went)
    # A page is itself, whatever lies beside it and wherever its bytes lie.
    assert torch.equal(codec.encode(keys[1:2], values[1:2]), payload[1:2])
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), payload.flatten()])[1:].view_as(payload)
    for page in range(3):
        alone = codec.decode(shifted[page : page + 1])
        assert all(same(came, went[page : page + 1]) for came, went in zip(alone, back, strict=True))
    nothing = codec.encode(keys[:0], values[:0])
    assert nothing.shape == (0, codec.page_bytes)
    assert codec.decode(nothing)[0].shape == (0, *keys.shape[1:])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_strides_do_not_matter(kind: CodecKind) -> None:
    shape = SHAPES[0]
    keys, values = kv(shape, torch.float32)
    strange = keys.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    wide = torch.cat([values, values], dim=-1)[..., : shape.value_dim]
    assert not strange.is_contiguous() and not wide.is_contiguous()
    codec = kind.build(shape, torch.float32)
    assert torch.equal(codec.encode(strange, wide), codec.encode(keys, values))
    shape = SHAPES[1]  # here even a flat view has gaps
    keys, values = kv(shape, torch.float32)
    gaps = [numbers.repeat_interleave(2, dim=-1)[..., ::2] for numbers in (keys, values)]
    codec = kind.build(shape, torch.float32)
    assert torch.equal(codec.encode(*gaps), codec.encode(keys, values))


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_keeps_every_bit(dtype: torch.dtype) -> None:
    shape = PageShape(heads=1, group=1, tokens=4, key_dim=8, value_dim=8)
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-45, 3e38, -3e38]).to(dtype)
    keys = odd.expand(2, 1, 4, 8)
    codec = Plain().build(shape, dtype)
    assert codec.lossless and codec.page_bytes == 4 * 16 * dtype.itemsize
    back = codec.decode(codec.encode(keys, keys))
    assert all(same(came, keys) for came in back)


def test_half_is_lossless_for_half_only() -> None:
    shape = SHAPES[0]
    assert Half().build(shape, torch.float16).lossless
    for dtype in (torch.float32, torch.bfloat16):
        codec = Half().build(shape, dtype)
        assert not codec.lossless and codec.page_bytes == 2 * shape.numbers
        keys, values = kv(shape, dtype)
        came, _ = codec.decode(codec.encode(keys, values))
        assert ((came.float() - keys.float()).abs() <= keys.float().abs() * 2.0**-11 + 2.0**-25).all()


def test_sizes_are_exact_scales_included() -> None:
    shape = SHAPES[0]
    rows = shape.heads * shape.tokens
    assert Quantised(8, 4).build(shape, torch.float32).page_bytes == rows * (64 + 32 + 4 * 2)
    assert Quantised(4, 4).build(shape, torch.float32).page_bytes == rows * (32 + 32 + 4 * 2)
    odd = SHAPES[2]
    assert Quantised(8, 4).build(odd, torch.float32).page_bytes == odd.heads * odd.tokens * (13 + 4 + 4 * 2)
    # The facts' figure: K8V4 is 2.46 times smaller than fp16 at 64 dimensions.
    assert round(2 * shape.numbers / Quantised(8, 4).build(shape, torch.float32).page_bytes, 2) == 2.46


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("size", [1e-6, 1.0, 300.0])
@pytest.mark.parametrize("offset", [0.0, 1000.0, -1000.0])
def test_quantised_is_within_half_a_step(bits: int, size: float, offset: float) -> None:
    shape = SHAPES[0]
    keys, values = (numbers + offset for numbers in kv(shape, torch.float32, size=size))
    codec = Quantised(bits, bits).build(shape, torch.float32)
    for came, went in zip(codec.decode(codec.encode(keys, values)), (keys, values), strict=True):
        span = went.amax(-1, keepdim=True) - went.amin(-1, keepdim=True)
        # The stored step is at most this: rounded up, from a least number that was rounded down, to fp16.
        step = span / (2**bits - 1) * (1 + 2.0**-9) + went.abs().amax(-1, keepdim=True) * 2.0**-9 / (2**bits - 1)
        error = (came - went).abs()
        assert (error <= (step + 2.0**-22) / 2 + went.abs() * 2.0**-22).all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not isinstance(kind, Plain)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strange_rows_stay_finite_and_near(kind: CodecKind, dtype: torch.dtype) -> None:
    shape = PageShape(heads=1, group=1, tokens=8, key_dim=8, value_dim=8)
    most = torch.finfo(dtype).max
    rows = torch.stack(
        [
            torch.zeros(8),
            torch.full((8,), 0.75),
            torch.full((8,), -1536.0),
            torch.tensor([most, -most] * 4),
            torch.full((8,), -most),
            torch.tensor([65504.0, -65504.0, 65000.0, 1.0, 0.0, -1.0, 3e-8, -3e-8]),
            torch.tensor([torch.finfo(dtype).tiny, *[0.0] * 7]),
            torch.linspace(-65504.0, 65504.0, 8),
        ]
    ).to(dtype)
    keys = rows.expand(1, 1, 8, 8)
    codec = kind.build(shape, dtype)
    payload = codec.encode(keys, keys)
    within = keys.float().clamp(-65504.0, 65504.0)
    assert torch.equal(payload, kind.build(shape, torch.float32).encode(within, within))
    for came in codec.decode(payload):
        assert came.isfinite().all()
        assert (came[0, 0, 3, ::2] > 50000).all() and (came[0, 0, 3, 1::2] < -50000).all()  # saturated, same side
        assert torch.equal(came[0, 0, :3], rows[:3])  # rows of one number that fp16 has


@pytest.mark.parametrize("bits, count", list(itertools.product([1, 2, 4, 8], [1, 7, 8, 13])))
def test_packing_turns_back(bits: int, count: int) -> None:
    codes = torch.randint(0, 2**bits, (4, 3, count), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    packed = pack(codes, bits)
    assert packed.shape == (4, 3, packed_width(count, bits))
    assert torch.equal(unpack(packed, bits, count), codes)


def test_halves_never_fall_short() -> None:
    numbers = torch.cat(
        [torch.randn(20000, generator=torch.Generator().manual_seed(1)) * 10.0**e for e in range(-9, 5)]
    )
    numbers = numbers[numbers.abs() <= 65504]
    above, below = half_above(numbers), half_below(numbers)
    assert (above.float() >= numbers).all() and (below.float() <= numbers).all()
    gap = numbers.abs() * 2.0**-9 + 2.0**-22
    assert (above.float() - numbers <= gap).all() and (numbers - below.float() <= gap).all()
    known = numbers.half().float()
    assert torch.equal(half_above(known).float(), known) and torch.equal(half_below(known).float(), known)
    assert half_above(torch.tensor([1e9, -1e9])).tolist() == [65504.0, -65504.0]
    assert half_above(torch.tensor(65480.0)) == 65504.0 and half_below(torch.tensor(-65480.0)) == -65504.0


def test_figures_that_cannot_be() -> None:
    for make in (lambda: Quantised(3, 4), lambda: Quantised(8, 16)):  # type: ignore[arg-type]
        with pytest.raises(ConfigError) as caught:
            make()
        assert caught.value.code == "SW-102"
