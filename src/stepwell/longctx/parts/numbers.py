"""Numbers in few bits: codes packed into bytes, fp16 scales that never fall short. What codecs and indexes share."""

from __future__ import annotations

import torch

FP16_MAX = 65504.0


def packed_width(count: int, bits: int) -> int:
    """Bytes of `count` codes of `bits` (1, 2, 4 or 8); the last byte may be filled up."""
    return -(-count * bits // 8)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., D] uint8 below 2^bits to [..., packed_width(D, bits)] uint8. The first code of a byte lies in its low
    bits; a row that does not fill its last byte has zeros there."""
    if bits == 8:
        return codes
    each = 8 // bits
    short = -codes.shape[-1] % each
    if short:
        codes = torch.nn.functional.pad(codes, (0, short))
    codes = codes.unflatten(-1, (-1, each))
    packed = codes[..., 0].clone()
    for at in range(1, each):
        packed |= codes[..., at] << (at * bits)
    return packed


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The other way round: [..., bytes] to [..., count]."""
    if bits == 8:
        return packed
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return codes.flatten(-2)[..., :count]


def half_above(numbers: torch.Tensor) -> torch.Tensor:
    """The number itself if fp16 has it, else one of the two next greater ones. For finite numbers; what would be
    beyond fp16 becomes its greatest number."""
    near = numbers.clamp(-FP16_MAX, FP16_MAX)
    up = (near + near.abs() * 2.0**-10 + 2.0**-24).clamp(max=FP16_MAX)
    half = near.half()
    return torch.where(half.float() < near, up.half(), half)


def half_below(numbers: torch.Tensor) -> torch.Tensor:
    """Does as `half_above`, but rounds towards minus infinity."""
    return -half_above(-numbers)
