"""Stores of cold pages: fixed-size pages of bytes, addressed by places that the store gives out."""

from __future__ import annotations

from typing import Protocol

import torch


class PageStore(Protocol):
    """Pages of `page_bytes` each. Thread-safe: a prefetch reads while the model's thread writes. Places are int64, not
    negative, and stay valid until they are freed. Bytes come back as they were put, or an IntegrityError is raised."""

    page_bytes: int

    def put(self, payload: torch.Tensor) -> torch.Tensor:
        """[m, page_bytes] uint8 to places [m]. Raises CapacityError if they do not fit; then nothing is stored."""

    def get(self, places: torch.Tensor) -> torch.Tensor:
        """[m] to [m, page_bytes] uint8, in this order; a place may be asked for twice."""

    def retain(self, places: torch.Tensor) -> None:
        """Adds an owner to each of these places (a place may be named twice), for rows of a batch that share a past."""

    def free(self, places: torch.Tensor) -> None:
        """Removes an owner from each; places without owners are given out again."""

    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes in use by tier: "host", "disk"."""

    def close(self) -> None:
        """Frees everything. Idempotent."""
