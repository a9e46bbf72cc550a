"""Decoding a batch of a fixed size: replayed from a CUDA graph on CUDA, since launching some hundred kernels one by one
takes longer than they run, and would hide what copies beside them cost. On CPU it is called as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lab.bench.gpu.engine.attention import numbers
from lab.bench.gpu.engine.model import Llama

Tensor = Any
WARM_UPS = 3


class Decoder:
    """Up to `batch` requests of up to `pages` pages. Rows without a request write to page 0, which belongs to nobody.
    `graph` None: not captured."""

    def __init__(self, model: Llama, batch: int, pages: int) -> None:
        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=model.device)

        self._model = model
        self.device = model.device
        self.batch, self.pages = batch, pages
        self._tokens, self._positions, self._table = zeros(batch), zeros(batch), zeros(batch, pages)
        self._known: list[list[int]] = [[] for _ in range(batch)]
        self.graph: Any = None
        self._next: Tensor = None
        if model.device.type == "cuda":
            self._capture()

    def _capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._decode()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._next = self._decode()

    def _decode(self) -> Tensor:
        return self._model.decode(self._tokens, self._positions, self._table)

    def run(self, tokens: Sequence[Tensor], positions: Sequence[int], tables: Sequence[Sequence[int]]) -> Tensor:
        """The next token of each, [requests], on the device. Does not wait for it. `tokens` are on the device."""
        count = len(tokens)
        if count > self.batch or max(map(len, tables), default=0) > self.pages:
            raise ValueError(f"{count} requests of up to {max(map(len, tables))} pages: more than was made room for")
        rest = self.batch - count
        self._tokens[:count] = torch.stack(list(tokens)) if count else 0
        self._positions.copy_(numbers([*positions, *[0] * rest], self._model.device))
        for row, table in enumerate([*tables, *[()] * rest]):
            if self._known[row] != list(table):
                self._known[row] = list(table)
                padded = [*table, *[0] * (self.pages - len(table))]
                self._table[row].copy_(numbers(padded, self._model.device))
        if self.graph is not None:
            self.graph.replay()
        else:
            self._next = self._decode()
        return self._next[:count].clone()  # the next step writes over the original
