"""VERIFIED: tokens are drafted with a sparse policy and checked, several at a time, in one exact pass.

The greedy tokens are full attention's own, for any draft: only tokens that the exact pass would have produced itself
are accepted, and the first one that differs is taken from it (self-speculation with a compressed cache: VeriCache,
arXiv 2605.17613). The tokens of drafting are taken out of the cache before the check, which computes their keys and
values anew, so nothing of a sparse step ever stays.
"""

from __future__ import annotations

from typing import Any

import torch

from stepwell.errors import Unsupported
from stepwell.longctx.model.cache import TieredCache

_MEMORY = 0.9


class DraftLength:
    """If a drafted token agrees with probability p, k drafts and one check give (1 - p^(k+1)) / (1 - p) tokens on
    average (taking agreements as independent) and move k drafts' and one check's bytes. p and both costs are learned as
    running means."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._agreed, self._asked = 0.95 * 16, 16.0
        self._draft, self._check = 1.0, 16.0
        self._known = False

    @property
    def agreement(self) -> float:
        return self._agreed / self._asked

    def best(self) -> int:
        return min(range(1, self._most + 1), key=self._cost)

    def learn(self, drafted: int, accepted: int, draft_cost: float, check_cost: float) -> None:
        """Learns from one round. Costs are in any one unit; if nothing was moved at all, they stay as they were."""
        asked = min(accepted + 1, drafted)
        self._agreed = self._agreed * _MEMORY + accepted
        self._asked = self._asked * _MEMORY + asked
        if check_cost > 0:
            keep = _MEMORY if self._known else 0.0
            self._draft = self._draft * keep + draft_cost * (1 - keep)
            self._check = self._check * keep + check_cost * (1 - keep)
            self._known = True

    def _cost(self, count: int) -> float:
        p = min(self.agreement, 0.999)
        tokens = (1 - p ** (count + 1)) / (1 - p)
        return (self._check + count * self._draft) / tokens


@torch.no_grad()
def decode(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> torch.Tensor:
    """A `custom_generate` of transformers: [B, n] to [B, n + generated] token ids, greedy. Rows of a batch advance
    together, by what all of them accept. Raises Unsupported SW-717 for anything but greedy search over tokens, and for
    what remembers the tokens that it was asked about: each is asked about several times. Logits processors of one's own
    must answer by their arguments alone."""
    _refuse(generation_config, model_kwargs)
    cache: TieredCache = model_kwargs["past_key_values"]
    run = _Run(model, cache, model_kwargs.get("attention_mask"), logits_processor)
    tokens, length = input_ids, DraftLength(cache.policy.draft_tokens)
    end, pads = generation_config._eos_token_tensor, generation_config._pad_token_tensor
    going = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
    cache.activate_past_recording()
    scores = run.forward(tokens[:, cache.get_seq_length() :], exact=True)[:, -1]
    found = run.best(tokens, scores)[:, None]
    while True:
        for column in found.unbind(1):
            if pads is not None and end is not None:
                column = torch.where(going, column, pads)
            tokens = torch.cat([tokens, column[:, None]], 1)
            if streamer is not None:
                streamer.put(column.cpu())
            going = going & ~stopping_criteria(tokens, None)
            if not going.any():
                break
        _trim(cache, tokens.shape[1] - 1)
        if not going.any():
            if streamer is not None:
                streamer.end()
            return tokens
        found = _round(run, tokens, length, going)


def _refuse(config: Any, model_kwargs: dict[str, Any]) -> None:
    for found, what in (
        (config.do_sample, "sample"),
        (config.num_beams > 1, "search with beams"),
        (config.return_dict_in_generate, "return more than tokens"),
        (config.guidance_scale not in (None, 1), "be guided by a second text (guidance_scale)"),
        (config.watermarking_config is not None, "leave watermarks"),
        (model_kwargs.get("inputs_embeds") is not None, "begin with embeddings"),
    ):
        if found:
            raise Unsupported(
                "SW-717",
                what=f"a verified policy cannot {what}",
                why="it checks that each token is the one that full attention finds most likely behind those before",
                fix="leave that out of the call of generate, or attach with an exact policy",
            )


def _round(run: _Run, tokens: torch.Tensor, length: DraftLength, going: torch.Tensor) -> torch.Tensor:
    """Drafts and checks one round: the accepted tokens, [B, 1 to k + 1]. All drafts are in the cache then."""
    ledger, count = run.cache.ledger, length.best()
    before = ledger.cold_to_hot()
    drafted = tokens
    for _ in range(count):
        drafted = torch.cat([drafted, run.best(drafted, run.forward(drafted[:, -1:])[:, -1])[:, None]], 1)
    run.cache.crop(-count)
    between = ledger.cold_to_hot()
    scores = run.forward(drafted[:, -count - 1 :], exact=True)
    after = ledger.cold_to_hot()
    start = tokens.shape[1]
    found: list[torch.Tensor] = []
    for nth in range(count + 1):
        best = run.best(drafted[:, : start + nth], scores[:, nth])
        found.append(best)
        if nth == count or not (best == drafted[:, start + nth])[going].all():
            break
    accepted = len(found) - 1
    ledger.verifies += 1
    ledger.drafted += count
    ledger.accepted += accepted
    length.learn(count, accepted, (between - before) / count, after - between)
    return torch.stack(found, 1)


def _trim(cache: TieredCache, length: int) -> None:
    """Removes tokens that were not accepted, or were accepted and are not needed. Once for each check: a crop makes
    windows forget what was before them, so a second one would come too late."""
    cache.crop(length - cache.get_seq_length())


class _Run:
    def __init__(self, model: Any, cache: TieredCache, mask: torch.Tensor | None, processor: Any) -> None:
        self.model, self.cache = model, cache
        self._mask, self._process = mask, processor

    def forward(self, tokens: torch.Tensor, exact: bool = False) -> torch.Tensor:
        """Logits of all of `tokens`, which follow the content of the cache: [B, q, vocabulary]."""
        past = self.cache.get_seq_length()
        mask, positions = self._mask, None
        if mask is not None:
            missing = past + tokens.shape[1] - mask.shape[1]
            if missing > 0:
                mask = torch.cat([mask, mask.new_ones(len(mask), missing)], 1)
            mask = mask[:, : past + tokens.shape[1]]
            positions = (mask.long().cumsum(1) - 1).clamp_min(0)[:, past:]
        options = {"attention_mask": mask, "position_ids": positions, "past_key_values": self.cache, "use_cache": True}
        with self.cache.exactly() if exact else self.cache.drafting():
            found: torch.Tensor = self.model(tokens, **options).logits
        return found

    def best(self, before: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[B]: the most likely token behind `before`."""
        chosen: torch.Tensor = self._process(before, scores.float()).argmax(-1)
        return chosen
