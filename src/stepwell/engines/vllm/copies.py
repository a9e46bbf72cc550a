"""Copying between the engine's pages and a slot, on CPU. The one class that a CUDA twin will replace.

A shard lies in its slot page by page, and within a page layer by layer:

    slot:  | page 0: layer 0 | layer 1 | ... | page 1: layer 0 | ... |

Pages are opaque bytes: on CPU their content is packed for the instruction set, which is part of the namespace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stepwell.errors import Unsupported

Bytes = npt.NDArray[np.uint8]


class CpuCopies:
    """Views of one rank's KV caches. Indices are checked here: a wrong one raises IndexError, never touches memory.

    Raises Unsupported (SW-707) for tensors whose pages are not one contiguous piece of CPU memory each.
    """

    def __init__(self, kv_caches: Mapping[str, Any], num_pages: int) -> None:
        rows: list[Bytes] = []
        seen: set[int] = set()
        for name, tensor in kv_caches.items():
            if tensor.data_ptr() in seen:
                continue  # layers may share their KV
            seen.add(tensor.data_ptr())
            rows.append(_rows(name, tensor, num_pages))
        self._rows = rows
        self._sizes = [row.shape[1] for row in rows]
        self.num_pages = num_pages
        self.page_bytes = sum(self._sizes)

    def gather(self, pages: Sequence[int], slot: Bytes) -> None:
        """Copies whole pages into a slot, in order; they must fill it."""
        self._check(pages, slot)
        if len(pages) * self.page_bytes != len(slot):
            raise IndexError(f"{len(pages)} pages do not fill a slot of {len(slot)} bytes")
        at = 0
        for page in pages:
            for row, size in zip(self._rows, self._sizes, strict=True):
                slot[at : at + size] = row[page]
                at += size

    def scatter(self, slot: Bytes, skip: int, pages: Sequence[int]) -> None:
        """Copies a slot's pages, from page `skip` on, into these pages of the engine."""
        at = skip * self.page_bytes
        self._check(pages, slot[at:])
        for page in pages:
            for row, size in zip(self._rows, self._sizes, strict=True):
                row[page] = slot[at : at + size]
                at += size

    def _check(self, pages: Sequence[int], slot: Bytes) -> None:
        if len(pages) * self.page_bytes > len(slot) or not all(0 <= page < self.num_pages for page in pages):
            raise IndexError(f"{len(pages)} pages of {self.num_pages} do not fit a slot of {len(slot)} bytes")


def _rows(name: str, tensor: Any, num_pages: int) -> Bytes:
    """A layer's storage as (pages, bytes)."""
    import torch

    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.shape[0] != num_pages:
        raise Unsupported(
            "SW-707",
            what=f"the KV cache of layer {name}",
            why=f"shape {tuple(tensor.shape)}, stride {tensor.stride()}, device {tensor.device}: "
            f"not {num_pages} contiguous pages in CPU memory",
            fix="report this layout to stepwell",
        )
    view: Bytes = tensor.view(num_pages, -1).view(torch.uint8).numpy()
    return view
