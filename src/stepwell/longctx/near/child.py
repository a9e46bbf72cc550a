"""The process that owns the cold pages of a cache, and scores its keys where they lie.

Two lines lead here, each served by a thread: one for pages, one for scores, so that pages can be read while others are
scored. It ends when either is closed, or when the process that started it is gone. What it holds is plain KV: it leaves
no core dump.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable

import torch

from stepwell.errors import StepwellError
from stepwell.io.process import dumps
from stepwell.longctx.near import wire
from stepwell.longctx.near.kinds import build
from stepwell.longctx.parts.index.base import KeyIndex
from stepwell.longctx.parts.select.mass import weigh
from stepwell.longctx.shape import PageShape
from stepwell.longctx.store.budget import Bounds
from stepwell.longctx.store.tiers import Tiers

_POLL_S = 0.5
Tensors = list[torch.Tensor]
Handler = Callable[[wire.Request, Tensors], tuple[wire.RequestDone, Tensors]]


class Scored:
    """The key index of one layer, which of its tokens are no padding, [L, N] bool, and which pages come first, [L, n]
    bool (None: there is no padding)."""

    def __init__(self, make: wire.Make) -> None:
        self.index: KeyIndex = build(make.kind).build(make.shape)
        self.shape: PageShape = make.shape
        self.visible: torch.Tensor | None = None
        self.first: torch.Tensor | None = None

    def best(self, asked: wire.Best, query: torch.Tensor, hot_lse: torch.Tensor, *bits: torch.Tensor) -> Tensors:
        if asked.visible is not None:
            self.visible = self.first = None
            if asked.visible >= 0:
                self.visible = wire.unpacked(bits[0], asked.visible)
                self.first = wire.unpacked(bits[1], asked.visible // self.shape.tokens)
        found = weigh(
            self.index.score(query),
            hot_lse,
            granularity=self.index.granularity,
            scale=asked.scale,
            softcap=asked.softcap,
            page_tokens=self.shape.tokens,
            valid=self.visible,
        )
        score = found.score(self.first)
        pages = score.topk(min(asked.count, score.shape[1]), sorted=False).indices
        at = pages[:, None, None].expand(*found.mass.shape[:3], -1)
        of_best = found.mass.gather(-1, at)
        rest = found.mass.scatter(-1, at, 0.0).sum(-1)
        return [pages.int(), of_best.log().half(), rest, found.whole]


class PageOwner:
    """Everything stored in this process. `pages` and `scores` are called by a thread each."""

    def __init__(self) -> None:
        self._stores: dict[int, Tiers] = {}
        self._layers: dict[int, Scored] = {}
        self._bounds = Bounds(None)

    def pages(self, request: wire.Request, tensors: Tensors) -> tuple[wire.RequestDone, Tensors]:
        found: Tensors = []
        match request:
            case wire.Open(page_bytes):
                self._stores[page_bytes] = Tiers(page_bytes, bounds=self._bounds)
            case wire.Put(page_bytes):
                found = [self._stores[page_bytes].put(*tensors)]
            case wire.Get(page_bytes):
                found = [self._stores[page_bytes].get(*tensors)]
            case wire.Retain(page_bytes):
                self._stores[page_bytes].retain(*tensors)
            case wire.Free(page_bytes):
                self._stores[page_bytes].free(*tensors)
            case wire.Usage(page_bytes):
                return wire.RequestDone(self._stores[page_bytes].bytes_by_tier()), []
            case wire.Close(page_bytes):
                self._stores[page_bytes].close()
            case _:
                raise TypeError(f"{type(request).__name__} came on the line for pages")
        return wire.RequestDone(), found

    def scores(self, request: wire.Request, tensors: Tensors) -> tuple[wire.RequestDone, Tensors]:
        match request:
            case wire.NearHello():
                self._bounds = Bounds.of(request.host or None, request.disk)
                torch.set_num_threads(request.threads)
                sys.path += [path for path in request.paths if path not in sys.path]
            case wire.Make(layer):
                self._layers[layer] = Scored(request)
            case wire.Best(layer):
                return wire.RequestDone(), self._layers[layer].best(request, *tensors)
            case wire.Add(layer):
                self._layers[layer].index.add(*tensors)
                return self._usage(layer)
            case wire.Crop(layer, pages):
                self._layers[layer].index.crop(pages)
                return self._usage(layer)
            case wire.SelectRows(layer):
                self._layers[layer].index.rows(*tensors)
                return self._usage(layer)
            case _:
                raise TypeError(f"{type(request).__name__} came on the line for scores")
        return wire.RequestDone(), []

    def _usage(self, layer: int) -> tuple[wire.RequestDone, Tensors]:
        return wire.RequestDone({"index": self._layers[layer].index.nbytes}), []


def serve(line: socket.socket, handle: Handler) -> None:
    """Answers until the other end is closed."""
    with torch.no_grad():
        while True:
            try:
                request, tensors, _ = wire.receive(line)
            except (EOFError, OSError):
                return
            answer, found = answered(handle, request, tensors)  # type: ignore[arg-type]
            del tensors
            try:
                wire.send(line, answer, found)
            except OSError:
                return
            del found


def answered(handle: Handler, request: wire.Request, tensors: Tensors) -> tuple[wire.Answer, Tensors]:
    try:
        return handle(request, tensors)
    except StepwellError as error:
        return wire.RequestRefused(error.code, error.what, error.why, error.fix), []
    except ValueError as error:
        return wire.Wrong(str(error)), []
    except Exception as error:  # noqa: BLE001 - whatever it is, the one who asked must not wait for ever
        return wire.Broken(f"{type(error).__name__}: {error}"[:500]), []


def main(pages: int, scores: int, parent: int) -> None:
    """`pages` and `scores`: descriptors of the two lines. `parent`: the process to end with."""
    dumps.forbid()
    owner = PageOwner()
    ended = threading.Event()

    def until_closed(fd: int, handle: Handler) -> None:
        try:
            serve(socket.socket(fileno=fd), handle)
        finally:
            ended.set()

    for fd, handle in ((pages, owner.pages), (scores, owner.scores)):
        threading.Thread(target=until_closed, args=(fd, handle), daemon=True).start()
    # Not only the lines: a process that the parent forked may hold its ends of them open.
    while os.getppid() == parent and not ended.wait(_POLL_S):
        pass
    os._exit(0)  # at once, whatever a disk is doing; files without a name and memory go with the process
