"""A key index that another process owns: queries go there, the best pages and their scores come back."""

from __future__ import annotations

import contextlib

import torch

from stepwell.errors import BackendDown
from stepwell.longctx.ledger import Ledger
from stepwell.longctx.near import wire
from stepwell.longctx.near.kinds import describe
from stepwell.longctx.near.process import NearProcess
from stepwell.longctx.parts.index.base import IndexKind
from stepwell.longctx.parts.select.base import Candidates
from stepwell.longctx.parts.select.mass import Masses
from stepwell.longctx.shape import PageShape


class NearKeys:
    """Key index of one layer. Keys are transferred once, as they step down (ledger: "index"); transfers for scoring are
    "score". All calls but `crop` raise BackendDown SW-509 if the process is gone."""

    nbytes = 0
    """Bytes on the fast tier."""

    def __init__(self, process: NearProcess, ledger: Ledger, layer: int, kind: IndexKind, shape: PageShape) -> None:
        self._process, self._ledger, self._layer = process, ledger, layer
        self._shape = shape
        self.far_bytes = 0
        """Bytes of the index in the other process."""
        self._pages = 0
        self._told: list[torch.Tensor] = []
        """Padding that the other side knows: which tokens are real, and which pages come first."""
        process.call("scores", wire.Make(layer, describe(kind), shape))

    def add(self, keys: torch.Tensor) -> None:
        answer = self._process.call("scores", wire.Add(self._layer), [keys])
        self._pages += keys.shape[2] // self._shape.tokens
        self.far_bytes = answer.usage["index"]
        self._ledger.moved("hot", "cold", "index", answer.sent)

    def estimate(
        self,
        query: torch.Tensor,
        hot_lse: torch.Tensor,
        *,
        scale: float,
        softcap: float | None,
        tokens: int,
        count: int,
        valid: torch.Tensor | None = None,
        always: torch.Tensor | None = None,
    ) -> Candidates:
        """The candidates of `mass.estimate`, with the scores of the `count` best pages of each lane alone, rounded to
        float16. The other pages share the remaining mass evenly, so that masses still add up to 1, and rank behind."""
        visible, bits = self._news(valid, always)
        asked = wire.Best(self._layer, count, scale, softcap, tokens, visible)
        answer = self._process.call("scores", asked, [query, hot_lse, *bits])
        self._ledger.moved("hot", "cold", "score", answer.sent)
        self._ledger.moved("cold", "hot", "score", answer.received)
        pages, logs, rest, whole = (each.to(query.device, non_blocking=True) for each in answer.tensors)
        allowed = None if valid is None else valid.unflatten(1, (self._pages, -1)).any(-1)
        known = torch.zeros(query.shape[0], self._pages, dtype=torch.bool, device=query.device)
        known = known.scatter_(1, pages.long(), True)
        others = ~known if allowed is None else allowed & ~known
        even = rest / others.sum(1).clamp_min(1)[:, None, None]
        mass = even[..., None] * others[:, None, None]
        mass = mass.scatter_(-1, pages.long()[:, None, None].expand(logs.shape), logs.float().exp())
        score = Masses(mass, whole, allowed).score(always)
        # Rounding could let one of the others pass.
        least = score.masked_fill(~known, torch.inf).amin(1, keepdim=True)
        behind = torch.nextafter(least, least.new_tensor(-torch.inf))
        score = torch.where(known, score, torch.minimum(score, behind))
        return Candidates(mass, (hot_lse - whole).exp(), score, tokens, self._shape.tokens)

    def crop(self, pages: int) -> None:
        self._pages = min(self._pages, pages)
        with contextlib.suppress(BackendDown):
            self.far_bytes = self._process.call("scores", wire.Crop(self._layer, pages)).usage["index"]

    def rows(self, lanes: torch.Tensor) -> None:
        self.far_bytes = self._process.call("scores", wire.SelectRows(self._layer), [lanes]).usage["index"]

    def _news(self, valid: torch.Tensor | None, always: torch.Tensor | None) -> tuple[int | None, list[torch.Tensor]]:
        """Padding fields of a request, and their bits: none if the other side knows them."""
        if valid is None:
            self._told = []
            return -1, []
        first = always if always is not None else valid.new_zeros(len(valid), self._pages)
        now = [valid, first]
        if self._told and all(map(torch.equal, self._told, now)):
            return None, []
        self._told = [each.clone() for each in now]
        return valid.shape[1], [wire.packed(each) for each in now]
