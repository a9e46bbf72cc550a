"""Between the batch that a model knows and the lanes that select and move pages on their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Lanes:
    """Rows of a batch with `kv_heads` each: a lane has all heads of a row (`joint`), or is one head of it."""

    kv_heads: int
    joint: bool

    @property
    def heads(self) -> int:
        """KV heads of a lane."""
        return self.kv_heads if self.joint else 1

    def of_rows(self, batch: int) -> int:
        return batch if self.joint else batch * self.kv_heads

    def split(self, states: torch.Tensor) -> torch.Tensor:
        """[B, KV heads, ...] to [L, H, ...]; a view."""
        return states if self.joint else states.flatten(0, 1).unsqueeze(1)

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """[B, query heads, Q, D] to [L, H, G, Q, D]: consecutive query heads share a KV head."""
        batch, heads, steps, dim = query.shape
        return self.split(query.reshape(batch, self.kv_heads, heads // self.kv_heads, steps, dim))

    def outputs(self, output: torch.Tensor) -> torch.Tensor:
        """[L, H, G, Q, D] to [B, Q, query heads, D], contiguous, as transformers wants it."""
        lanes, heads, group, steps, dim = output.shape
        batch = lanes * heads // self.kv_heads
        return output.reshape(batch, self.kv_heads * group, steps, dim).transpose(1, 2).contiguous()

    def rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The lanes of these rows."""
        if self.joint:
            return rows
        return (rows[:, None] * self.kv_heads + torch.arange(self.kv_heads, device=rows.device)).flatten()

    def masks(self, mask: torch.Tensor) -> torch.Tensor:
        """[B, ...] to [L, ...]."""
        return mask if self.joint else mask.repeat_interleave(self.kv_heads, 0)
