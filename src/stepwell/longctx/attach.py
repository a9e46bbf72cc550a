"""One line in front of `model.generate`: contexts beyond the model's device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from stepwell.errors import StepwellError, Unsupported
from stepwell.longctx import foresight, hook, verified
from stepwell.longctx.cache import TieredCache
from stepwell.longctx.ledger import Ledger
from stepwell.longctx.policies import named
from stepwell.longctx.policy import Mode, Policy
from stepwell.longctx.support import layer_types

PREFILL_TOKENS = 1024
"""Of a prompt, computed at a time: what a chunk takes on the device is on top of the hot budget."""


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
    hook.register()
    chosen = named(policy) if isinstance(policy, str) else policy
    attached = Attached(model, chosen, {"hot_tokens": hot_tokens, "host": host, "disk": disk}, prefill_tokens)
    attached.new_cache().close()  # impossible sizes are told now
    before, own = model.config._attn_implementation, model.__dict__.get("generate")
    plain = model.generate
    handles: list[Any] = []
    try:
        model.set_attn_implementation(hook.NAME)
        if chosen.prefetch or chosen.query == "ahead":
            handles = foresight.install(model)
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
    """What `attach` gives."""

    def __init__(self, model: Any, policy: Policy, sizes: dict[str, Any], prefill_tokens: int) -> None:
        self._model, self._sizes, self._prefill_tokens = model, sizes, prefill_tokens
        self.policy = policy
        self.ledger = Ledger()
        """Of the last generation."""

    def new_cache(self) -> TieredCache:
        return TieredCache(self._model.config, self.policy, **self._sizes)

    @torch.no_grad()
    def prefill(self, input_ids: torch.Tensor, cache: TieredCache, attention_mask: torch.Tensor | None = None) -> None:
        """Computes all of `input_ids`, [B, n], that is not in the cache yet, but the last two tokens: in parts, so that
        the prompt may be longer than memory on the device. Each part is exact over what the tiers hold; two are left,
        since a pass over more than one token is exact in any mode, and the first answer hangs on it."""
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

    def generate(self, plain: Any, inputs: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """`model.generate`, `plain` being the one that is there without stepwell."""
        given = kwargs.get("past_key_values")
        if given is not None and not isinstance(given, TieredCache):
            return plain(inputs, **kwargs)
        _refuse(kwargs)
        cache = given if given is not None else self.new_cache()
        self.ledger = cache.ledger
        ids = inputs if inputs is not None else kwargs.get("input_ids")
        seen = _Seen()
        criteria = [*(kwargs.pop("stopping_criteria", None) or []), seen]
        if cache.policy.mode is Mode.VERIFIED:
            kwargs["custom_generate"] = verified.decode
        try:
            if ids is not None:
                copies = self._copies(kwargs)
                if ids.shape[1] - cache.get_seq_length() > self._prefill_tokens:
                    self.prefill(ids, cache, kwargs.get("attention_mask"))
                    if copies > 1:
                        cache.batch_repeat_interleave(copies)
            return plain(
                inputs, past_key_values=cache, stopping_criteria=StoppingCriteriaList(criteria), **_without(kwargs)
            )
        except StepwellError as error:
            error.tokens = seen.tokens if seen.tokens is not None else ids  # type: ignore[attr-defined]
            raise
        finally:
            cache.measure()
            if given is None and not kwargs.get("return_dict_in_generate"):
                cache.close()

    def _copies(self, kwargs: dict[str, Any]) -> int:
        """Rows that generate makes of each row of its input."""
        config = kwargs.get("generation_config") or self._model.generation_config
        beams = kwargs.get("num_beams") or config.num_beams or 1
        returned = kwargs.get("num_return_sequences") or config.num_return_sequences or 1
        return int(max(beams, returned))


def _without(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "past_key_values"}


def _refuse(kwargs: dict[str, Any]) -> None:
    for name, why in (
        ("assistant_model", "a drafting model has a cache of its own; policies with mode VERIFIED draft without one"),
        ("prompt_lookup_num_tokens", "policies with mode VERIFIED draft by themselves"),
        ("cache_implementation", "the cache is stepwell's"),
        ("prefill_chunk_size", "stepwell computes prompts in parts by itself: see prefill_tokens"),
    ):
        if kwargs.get(name) is not None:
            raise Unsupported(
                "SW-717",
                what=f"generate cannot be used with {name} and a cache across tiers",
                why=why,
                fix=f"leave {name} out",
            )
    if kwargs.get("use_cache") is False:
        raise Unsupported(
            "SW-717",
            what="generate was told to use no cache",
            why="without a cache there is nothing to keep across tiers",
            fix="leave use_cache out, or call generate outside attach",
        )


class _Seen(StoppingCriteria):
    """Never stops; remembers what was generated, for whom an error ends it."""

    def __init__(self) -> None:
        self.tokens: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.tokens = input_ids
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
