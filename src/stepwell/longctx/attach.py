"""One line in front of `model.generate`: contexts beyond the model's device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from stepwell.errors import ConfigError, StepwellError
from stepwell.longctx import verified
from stepwell.longctx.ledger import Ledger
from stepwell.longctx.model import foresight, hook, selfcheck
from stepwell.longctx.model.cache import TieredCache
from stepwell.longctx.model.options import CallOptions
from stepwell.longctx.model.support import layer_types
from stepwell.longctx.policies import named
from stepwell.longctx.policy import AttentionMode, Policy
from stepwell.longctx.saved import contexts

PREFILL_TOKENS = 1024
"""Prompt tokens computed at a time: the memory of a chunk on the device comes on top of the hot budget."""


@contextmanager
def attach(
    model: Any,
    policy: str | Policy = "stepwell",
    *,
    hot_tokens: int = 2048,
    host: int | str | None = "4GiB",
    disk: str | Sequence[str] | None = None,
    prefill_tokens: int = PREFILL_TOKENS,
) -> Iterator[Attached]:
    """Inside, `model.generate(...)` uses a cache across tiers, a new one for each call unless `past_key_values` is
    given; the model's own forward takes one, too. Arguments as for `TieredCache`. What generate cannot do with it is
    refused (Unsupported SW-717). Outside, the model is as it was before.

    A StepwellError that ends a generation has the tokens so far in its attribute `tokens`.
    """
    layer_types(model.config)  # refuses before anything is changed
    if prefill_tokens < 1:
        raise ConfigError(
            "SW-130",
            what=f"prefill_tokens={prefill_tokens} is no number of tokens",
            why="a prompt is computed in parts of so many tokens",
            fix="give at least 1, or leave it out",
        )
    hook.register()
    chosen = named(policy) if isinstance(policy, str) else policy
    attached = Attached(model, chosen, {"hot_tokens": hot_tokens, "host": host, "disk": disk}, prefill_tokens)
    attached.new_cache().close()  # raises for impossible sizes now
    before, own = model.config._attn_implementation, model.__dict__.get("generate")
    plain = model.generate
    handles: list[Any] = []
    try:
        model.set_attn_implementation(hook.NAME)
        selfcheck.check(model)
        if chosen.prefetch or chosen.query == "ahead":
            handles = foresight.install(model, chosen.lookahead)
        model.generate = lambda *args, **kwargs: attached.generate(plain, *args, **kwargs)
        yield attached
    finally:
        for handle in handles:
            handle.remove()
        if own is None:
            model.__dict__.pop("generate", None)
        else:
            model.generate = own
        model.set_attn_implementation(before)


class Attached:
    """The result of `attach`."""

    def __init__(self, model: Any, policy: Policy, sizes: dict[str, Any], prefill_tokens: int) -> None:
        self._model, self._sizes, self._prefill_tokens = model, sizes, prefill_tokens
        self.policy = policy
        self.ledger = Ledger()
        """Ledger of the last generation."""

    def new_cache(self) -> TieredCache:
        return TieredCache(self._model.config, self.policy, **self._sizes)

    @torch.no_grad()
    def prefill(self, input_ids: torch.Tensor, cache: TieredCache, attention_mask: torch.Tensor | None = None) -> None:
        """Computes all of `input_ids`, [B, n], that is not in the cache yet, but the last two tokens: in parts, so that
        the prompt may be longer than memory on the device. Each part is exact over what the tiers hold; two are left,
        since a pass over more than one token is exact in any mode, and the first answer hangs on it."""
        _check_begins(input_ids, cache)
        end = input_ids.shape[1] - 2
        while (start := cache.get_seq_length()) < end:
            until = min(start + self._prefill_tokens, end)
            options: dict[str, Any] = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
            if attention_mask is not None:
                mask = attention_mask[:, :until]
                options["attention_mask"] = mask
                options["position_ids"] = (mask.long().cumsum(1) - 1).clamp_min(0)[:, start:]
            with cache.exactly():
                self._model(input_ids[:, start:until], **options)
            cache.crop(0)  # windows that an earlier verified turn made record keep no more than they need
        _note_tokens(cache, input_ids, attention_mask)

    def save(self, path: str | Path, cache: TieredCache, *, key: bytes | None = None) -> None:
        """Keeps a prefilled cache in a file, sealed with `key` (32 bytes) or the key in stepwell's home, and bound to
        the contents of the model. Raises CapacityError SW-209 (the disk is full), AccessDenied SW-610, BackendDown
        SW-508; what was at `path` is there still, then."""
        contexts.save(self._model, cache, Path(path), key)

    def open(self, path: str | Path, *, key: bytes | None = None) -> TieredCache:
        """A cache with what was saved; its `tokens` are the ids in it, with which the next prompt must begin. Raises
        AccessDenied SW-610 (another key), IdentityMismatch SW-407 (another model), IntegrityError SW-306 (cut or
        changed), CapacityError SW-209 (these tiers do not hold it), ConfigError SW-135 (saved behind sparse steps, and
        the policy is an exact or verified one)."""
        cache = self.new_cache()
        try:
            contexts.open_into(self._model, cache, Path(path), key)
        except BaseException:
            cache.close()
            raise
        return cache

    def generate(self, plain: Any, inputs: torch.Tensor | None = None, *positional: Any, **named: Any) -> Any:
        """`model.generate`, `plain` being the one that is there without stepwell."""
        given = named.get("past_key_values")
        if given is not None and not isinstance(given, TieredCache):
            return plain(inputs, *positional, **named)
        wishes = CallOptions(self._model, positional, named)
        kwargs = wishes.arguments
        cache = given if given is not None else self.new_cache()
        self.ledger = cache.ledger
        ids = inputs if inputs is not None else kwargs.get("input_ids")
        seen = _Seen(cache.ledger)
        criteria = [*(kwargs.pop("stopping_criteria", None) or []), seen]
        if cache.policy.mode is AttentionMode.VERIFIED:
            # generate withholds the streamer from custom decoding
            kwargs["custom_generate"] = partial(verified.decode, streamer=kwargs.get("streamer"))
            criteria += wishes.stop_strings()
        try:
            if ids is not None:
                _check_begins(ids, cache)
                kwargs["attention_mask"] = wishes.mask(ids)
                if ids.shape[1] - cache.get_seq_length() > self._prefill_tokens:
                    self.prefill(ids, cache, kwargs["attention_mask"])
                    if wishes.copies > 1:
                        cache.batch_repeat_interleave(wishes.copies)
            rest = {name: value for name, value in kwargs.items() if name != "past_key_values"}
            found = plain(inputs, past_key_values=cache, stopping_criteria=StoppingCriteriaList(criteria), **rest)
            _note_tokens(cache, seen.tokens, kwargs.get("attention_mask"))
            return found
        except StepwellError as error:
            error.tokens = seen.tokens if seen.tokens is not None else ids  # type: ignore[attr-defined]
            raise
        finally:
            cache.measure()
            if given is None and not kwargs.get("return_dict_in_generate"):
                cache.close()


def _note_tokens(cache: TieredCache, tokens: torch.Tensor | None, mask: torch.Tensor | None) -> None:
    length = cache.get_seq_length()
    if tokens is None or tokens.shape[1] < length:
        cache.tokens = cache.mask = None
        return
    cache.tokens, cache.mask = tokens[:, :length].clone(), None
    if mask is not None and not bool(mask.all()):
        ones = mask.new_ones(len(mask), max(length - mask.shape[1], 0))
        cache.mask = torch.cat([mask, ones], 1)[:, :length].clone()


def _check_begins(ids: torch.Tensor, cache: TieredCache) -> None:
    """A prompt that does not begin with what is in the cache would be answered from another text, in silence."""
    known = cache.tokens
    if known is None or known.shape[1] != cache.get_seq_length():
        return
    if (
        ids.shape[0] != len(known)
        or ids.shape[1] <= known.shape[1]
        or not torch.equal(ids[:, : known.shape[1]].to(known.device), known)
    ):
        raise ConfigError(
            "SW-132",
            what="the prompt does not begin with what is in its cache, or has nothing behind it",
            why=f"the cache holds {known.shape[1]} tokens of another text, and generation would go on from those",
            fix="give the ids in `cache.tokens` and what comes behind them, crop the cache, or use a new one",
        )


class _Seen(StoppingCriteria):
    """Never stops; counts what was generated and remembers it, for whom an error ends it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.tokens: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.tokens = input_ids
        self._ledger.generated += 1
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
