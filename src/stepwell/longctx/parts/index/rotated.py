"""Every key in 1, 2 or 4 bits a channel: centred, rotated, normalised, on a Gaussian grid.

The scalar stand-in for HIGGS (arXiv 2411.17525) that our measurements used; YAKV (arXiv 2604.08426) selects with a
2-bit copy of all keys, TurboQuant (arXiv 2504.19874) has rotation with Lloyd-Max grids. Centring is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from stepwell.longctx.parts.figures import require
from stepwell.longctx.parts.index.base import Granularity
from stepwell.longctx.parts.index.stored import Stored
from stepwell.longctx.parts.numbers import FP16_MAX, pack
from stepwell.longctx.shape import PageShape

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
    # A multiplicative hash, not torch's generator, which may change.
    bits = torch.arange(1, dim + 1) * 0x9E3779B1 + SEED
    bits = ((bits & 0xFFFFFFFF) ^ (bits >> 15)) * 0x2C1B3C6D
    signs = 1.0 - 2.0 * ((bits >> 17) & 1)
    return (signs[:, None] * hadamard[:dim] / size**0.5).to(device)


# Lloyd-Max quantisers of a standard normal variable (Max, 1960): the upper halves; they are symmetric.
GRIDS = {
    1: (0.7979,),
    2: (0.4528, 1.5104),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
}


@dataclass(frozen=True, slots=True)
class RotatedKeys:
    """Scores each token with q times the decoded key. `centred`: the mean key of each lane and head is subtracted
    first; it is fixed by the first pages that are added (so add the prompt at once) and makes no error of its own,
    since q times it is the same for every token. With unbounded keys scores stay finite: norms beyond fp16 count as its
    greatest number. `nbytes` counts codes, an fp16 factor for each head and token, and the centre; rotation and grid
    are the same for all layers and are not counted."""

    bits: int = 2
    centred: bool = True

    def __post_init__(self) -> None:
        require(self.bits in GRIDS, self, "keys are kept in 1, 2 or 4 bits a channel")

    def build(self, shape: PageShape) -> CodedKeys:
        return CodedKeys(shape, self.bits, self.centred)


class CodedKeys(Stored):
    """`KeyIndex` of coded keys. Tensors: codes [L, H, N, padded D * bits / 8], factors [L, H, N]."""

    granularity: Granularity = "token"

    def __init__(self, shape: PageShape, bits: int, centred: bool) -> None:
        super().__init__(shape, each=shape.tokens)
        self._bits = bits
        self._centred = centred
        self._centre: torch.Tensor | None = None  # [L, H, 1, D] float32

    def add(self, keys: torch.Tensor) -> None:
        keys = keys.detach().float().clamp(-FP16_MAX, FP16_MAX)
        if self._centred:
            if self._centre is None:
                self._centre = keys.mean(2, keepdim=True)
            keys = keys - self._centre
        rotated = keys @ rotation(keys.shape[-1], keys.device)
        norms = torch.linalg.vector_norm(rotated, dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        grid, cuts = _grid(self._bits, keys.device)
        codes = torch.bucketize(rotated * (rotated.shape[-1] ** 0.5 / norms), cuts)
        points = grid[codes]
        # The factor that makes the grid point closest to the key: better than the norm alone, and as large.
        factors = (rotated * points).sum(-1) / points.square().sum(-1)
        self.extend(pack(codes.to(torch.uint8), self._bits), factors.clamp(max=FP16_MAX).half())

    def score(self, query: torch.Tensor) -> torch.Tensor:
        """Scores by byte tables: the contribution of each byte of a code to q.k is looked up and summed, without
        unpacking a key. The fastest of five methods measured on a CPU for 1 and 2 bits."""
        if self.empty:
            return self.nothing(query)
        codes, factors = self.used(0), self.used(1)
        query = query.detach().float()
        lanes, heads, group, dim = query.shape
        width = codes.shape[-1]
        turned = (query @ rotation(dim, query.device)).unflatten(-1, (width, -1))
        tables = torch.einsum("lhgwe,be->lhwbg", turned, _bytes(self._bits, query.device)).reshape(-1, group)
        starts = torch.arange(lanes * heads * width, dtype=torch.int32, device=query.device) * 256
        lookups = codes.int() + starts.view(lanes, heads, 1, width)
        sums = torch.nn.functional.embedding_bag(lookups.view(-1, width), tables, mode="sum")
        scores = (sums.view(lanes, heads, -1, group) * factors.unsqueeze(-1).float()).mT
        return scores if self._centre is None else scores + query @ self._centre.mT

    def crop(self, pages: int) -> None:
        super().crop(pages)
        if not pages:
            self._centre = None

    def rows(self, lanes: torch.Tensor) -> None:
        super().rows(lanes)
        if self._centre is not None:
            self._centre = self._centre.index_select(0, lanes)

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self._centre is None else self._centre.nbytes)


@lru_cache(maxsize=16)
def _grid(bits: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The 2^bits numbers that codes stand for, ascending, and the cuts between their cells."""
    upper = torch.tensor(GRIDS[bits])
    grid = torch.cat([-upper.flip(0), upper])
    return grid.to(device), ((grid[1:] + grid[:-1]) / 2).to(device)


@lru_cache(maxsize=16)
def _bytes(bits: int, device: torch.device) -> torch.Tensor:
    """[256, codes a byte]: the numbers that each byte stands for."""
    shifts = torch.arange(0, 8, bits)
    codes = (torch.arange(256)[:, None] >> shifts) & (2**bits - 1)
    return _grid(bits, device)[0][codes.to(device)]
