"""A fixed rotation that spreads a vector's energy over all its channels, so that one grid suits every channel."""

from __future__ import annotations

from functools import lru_cache

import torch

SEED = 20_260_101  # never changes: codes of a saved context must be read with the rotation that made them


def padded(dim: int) -> int:
    """The next power of two, at least 8: then codes of 1 bit fill bytes."""
    return max(8, 1 << (dim - 1).bit_length())


@lru_cache(maxsize=32)
def rotation(dim: int, device: torch.device) -> torch.Tensor:
    """[dim, padded(dim)] float32 with orthonormal rows: random signs, then a Hadamard matrix (Sylvester's). q.k is
    (q R).(k R). The same in every process and on every device."""
    size = padded(dim)
    hadamard = torch.ones(1, 1)
    while len(hadamard) < size:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    bits = (
        torch.arange(1, dim + 1) * 0x9E3779B1 + SEED
    )  # a multiplicative hash, not torch's generator, which may change
    bits = ((bits & 0xFFFFFFFF) ^ (bits >> 15)) * 0x2C1B3C6D
    signs = 1.0 - 2.0 * ((bits >> 17) & 1)
    return (signs[:, None] * hadamard[:dim] / size**0.5).to(device)
