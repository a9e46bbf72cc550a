"""What a step of the mini-engine computes: a model's tokens; or KV that tells of which prefix it is; or nothing.

Each hands its work to the device and does not wait for it: tokens are read when the engine wants them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lab.bench.gpu.engine.attention import numbers, where
from lab.bench.gpu.engine.decoder import Decoder
from lab.bench.gpu.engine.kv import Kv
from lab.bench.gpu.engine.model import Config, Llama

Tensor = Any
_PAGES_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens [start, start + count) of a request with these pages. `known`: all of its tokens that the engine knows; of
    one that decodes the last may be on the device only. `decodes`: it is one token, and another follows."""

    request: str
    known: Sequence[int]
    start: int
    count: int
    pages: Sequence[int]
    decodes: bool

    @property
    def tokens(self) -> Sequence[int]:
        return self.known[self.start : self.start + self.count]


class Sampled:
    """Tokens that follow, of some requests, on their way to the host. `tokens` waits for them, and for no later work of
    the device."""

    def __init__(self, names: Sequence[str], tokens: Tensor) -> None:
        self._names = names
        self._event = None
        self._tokens = tokens
        if tokens.device.type == "cuda":
            self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._tokens.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)
            self._event.record()

    def tokens(self) -> dict[str, int]:
        if self._event is not None:
            self._event.synchronize()
        return dict(zip(self._names, self._tokens.tolist(), strict=True))


class Compute(Protocol):
    steady: bool
    """It computes in every step, whatever is scheduled."""

    costs: bool
    """How long its steps take says what computing a prompt costs."""

    def forward(self, works: Sequence[Work]) -> Sampled:
        """Computes them, and a following token for each."""

    def forget(self, request: str) -> None:
        """It has ended."""


class Nothing:
    """No KV is written, the token that follows is 0: for what is timed without a model."""

    steady = costs = False

    def forward(self, works: Sequence[Work]) -> Sampled:
        return Sampled([work.request for work in works], torch.zeros(len(works), dtype=torch.int64))

    def forget(self, request: str) -> None:
        pass


class Tokens:
    """Of a model. Requests that decode do so together, in a batch of a fixed size."""

    steady, costs = False, True

    def __init__(self, config: Config, kv: Kv, *, batch: int, pages: int) -> None:
        with torch.inference_mode():
            self.model = Llama(config, kv.layers)
            self._decoder = Decoder(self.model, batch, pages)
        self._last: dict[str, Tensor] = {}

    @property
    def in_graph(self) -> bool:
        return self._decoder.graph is not None

    @torch.inference_mode()
    def forward(self, works: Sequence[Work]) -> Sampled:
        followed: dict[str, Tensor] = {}
        for work in works:
            if not work.decodes:
                followed[work.request] = self.model.prefill(work.tokens, work.start, work.pages)
        batch = [work for work in works if work.decodes]
        for first in range(0, len(batch), self._decoder.batch):
            part = batch[first : first + self._decoder.batch]
            tokens = [self._token(work) for work in part]
            found = self._decoder.run(tokens, [work.start for work in part], [work.pages for work in part])
            followed |= dict(zip((work.request for work in part), found, strict=True))
        self._last |= followed
        tokens = torch.stack(list(followed.values())) if followed else torch.zeros(0, dtype=torch.int64)
        return Sampled(list(followed), tokens)

    def _token(self, work: Work) -> Tensor:
        if work.tokens:
            return torch.tensor(work.tokens[-1], device=self.model.device)
        return self._last[work.request]

    def forget(self, request: str) -> None:
        self._last.pop(request, None)


class Marks:
    """KV of each page tells of its place in the prompt, whatever the tokens are: what comes back can be compared."""

    steady = costs = False

    def __init__(self, kv: Kv) -> None:
        self._kv = kv
        generator = torch.Generator().manual_seed(1)
        words = kv.shape.row_bytes // 4
        rows = [torch.randint(-(1 << 31), 1 << 31, (words,), generator=generator) for _ in kv.layers]
        self._rows = [row.to(kv.buffer.device, torch.int32) for row in rows]

    def forward(self, works: Sequence[Work]) -> Sampled:
        page = self._kv.shape.page
        for work in works:
            first = work.start // page
            for which, contents in self._contents(work.pages[first : -(-(work.start + work.count) // page)], first):
                for layer, content in zip(self._kv.words, contents, strict=True):
                    layer[which] = content
        return Sampled([work.request for work in works], torch.zeros(len(works), dtype=torch.int64))

    def differing(self, pages: Sequence[int]) -> int:
        """Bytes of a prompt's pages that are not what was written there."""
        wrong = torch.zeros((), dtype=torch.int64, device=self._kv.buffer.device)
        for which, contents in self._contents(pages, 0):
            for layer, content in zip(self._kv.words, contents, strict=True):
                wrong += (layer[which] != content).sum()
        return int(wrong.item())

    def _contents(self, pages: Sequence[int], first: int) -> Iterator[tuple[Tensor, Iterator[Tensor]]]:
        """Some pages at a time, and what belongs into them, layer by layer."""
        device = self._kv.buffer.device
        for at in range(0, len(pages), _PAGES_AT_ONCE):
            some = pages[at : at + _PAGES_AT_ONCE]
            places = torch.arange(first + at, first + at + len(some), device=device, dtype=torch.int32)[:, None]
            shape = len(some), *self._kv.words[0].shape[1:]
            contents = ((row + places * 0x01000193).view(torch.uint8).view(shape) for row in self._rows)
            yield numbers(some, device), contents

    def forget(self, request: str) -> None:
        pass


class Steady:
    """A batch that decodes one and the same token for ever, beside whatever else goes on: each step is as long as the
    one before, unless something slows it."""

    steady, costs = True, False

    def __init__(self, decoder: Decoder, tables: Sequence[Sequence[int]], tokens: int) -> None:
        self._decoder, self._tables = decoder, tables
        self._first = list(torch.zeros(len(tables), dtype=torch.int64, device=decoder.device))
        self._positions = [tokens - 1] * len(tables)
        self._names = [str(n) for n in range(len(tables))]

    @torch.inference_mode()
    def forward(self, works: Sequence[Work]) -> Sampled:
        return Sampled(self._names, self._decoder.run(self._first, self._positions, self._tables))

    def forget(self, request: str) -> None:
        pass


class Hashes:
    """KV of each token is a hash of all tokens up to it, and so is the token that follows. Each step looks at what it
    would attend to: `wrong` counts bytes that are not what they must be."""

    steady, costs = False, True

    def __init__(self, kv: Kv, vocabulary: int = 500) -> None:
        self._kv, self._vocabulary = kv, vocabulary
        heads, content = kv.words[0].shape[1], kv.words[0].shape[3]
        self._size = len(kv.layers), heads, content
        self._chains: dict[str, list[bytes]] = {}
        self._wrong = torch.zeros((), dtype=torch.int64, device=kv.buffer.device)

    @property
    def wrong(self) -> int:
        return int(self._wrong.item())

    def forward(self, works: Sequence[Work]) -> Sampled:
        return Sampled([work.request for work in works], torch.tensor([self._one(work) for work in works]))

    def _one(self, work: Work) -> int:
        chain = self._chains.setdefault(work.request, [])
        for at in range(len(chain), work.start + work.count):
            token = work.known[at] if at < len(work.known) else self._token(chain[-1])
            chain.append(hashlib.blake2b((chain[-1] if at else b"") + token.to_bytes(4, "big")).digest())
        self._check(work)
        self._write(work, chain[work.start : work.start + work.count])
        return self._token(chain[work.start + work.count - 1])

    def _token(self, digest: bytes) -> int:
        return int.from_bytes(digest[:4], "big") % self._vocabulary

    def _content(self, digests: Sequence[bytes]) -> Tensor:
        """[layers, tokens, heads, bytes]"""
        layers, heads, content = self._size
        raw = b"".join(hashlib.shake_128(digest).digest(layers * heads * content) for digest in digests)
        made = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(len(digests), layers, heads, content)
        made = made.transpose(0, 1).contiguous()
        return made.pin_memory().to(self._kv.buffer.device, non_blocking=True) if self._kv.device == "cuda" else made

    def _write(self, work: Work, digests: Sequence[bytes]) -> None:
        which, places = self._where(work.pages, work.start, len(digests))
        for layer, content in zip(self._kv.words, self._content(digests), strict=True):
            layer[which, :, places] = content

    def _check(self, work: Work) -> None:
        if work.start:
            which, places = self._where(work.pages, 0, work.start)
            expected = self._content(self._chains[work.request][: work.start])
            for layer, content in zip(self._kv.words, expected, strict=True):
                self._wrong += (layer[which, :, places] != content).sum()

    def _where(self, pages: Sequence[int], start: int, count: int) -> tuple[Tensor, Tensor]:
        return where(pages, start, count, self._kv.shape.page, self._kv.buffer.device)

    def forget(self, request: str) -> None:
        self._chains.pop(request, None)
