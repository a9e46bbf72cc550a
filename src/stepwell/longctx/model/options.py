"""Options of a call of generate, from its arguments, the generation configuration given to it, or the model's own."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationMixin, StoppingCriteria, StopStringCriteria

from stepwell.errors import Unsupported

_NAMES = tuple(inspect.signature(GenerationMixin.generate).parameters)[2:]
"""Names of generate's arguments behind the inputs, in order."""

_REFUSED = {
    "assistant_model": "a drafting model has a cache of its own; policies with mode VERIFIED draft without one",
    "assistant_early_exit": "policies with mode VERIFIED draft by themselves",
    "prompt_lookup_num_tokens": "policies with mode VERIFIED draft by themselves",
    "cache_implementation": "the cache is stepwell's",
    "prefill_chunk_size": "stepwell computes prompts in parts by itself: see prefill_tokens",
}


class CallOptions:
    """Options of one call. `arguments`: by name, positional ones included. Raises Unsupported SW-717 for options that a
    cache across tiers cannot serve; TypeError for too many arguments."""

    def __init__(self, model: Any, positional: Sequence[Any], named: dict[str, Any]) -> None:
        if len(positional) > len(_NAMES):
            raise TypeError(f"generate takes at most {len(_NAMES) + 1} arguments by position")
        self.arguments = named | dict(zip(_NAMES, positional, strict=False))
        self._given = self.arguments.get("generation_config")
        self._own = model.generation_config
        for name, why in _REFUSED.items():
            if self._asked(name) is not None:
                raise _refused(f"{name} and a cache across tiers", why, f"leave {name} out")
        if self._asked("use_cache") is False:
            raise _refused(
                "use_cache=False",
                "without a cache there is nothing to keep across tiers",
                "leave use_cache out, or call generate outside attach",
            )
        if self._own.cache_implementation is not None:  # it comes from the checkpoint, not from this call
            self.arguments["cache_implementation"] = None

    def of(self, name: str) -> Any:
        """The option's value; None: it is not set anywhere."""
        found = self._asked(name)
        return found if found is not None else getattr(self._own, name, None)

    def _asked(self, name: str) -> Any:
        found = self.arguments.get(name)
        return found if found is not None else getattr(self._given, name, None)

    @property
    def copies(self) -> int:
        """Rows that generate makes of each row of its input."""
        return int(max(self.of("num_beams") or 1, self.of("num_return_sequences") or 1))

    def stop_strings(self) -> list[StoppingCriteria]:
        """Stopping criteria for strings, taken out of the arguments: with custom decoding, generate asks for the
        tokenizer and drops it."""
        strings, tokenizer = self.of("stop_strings"), self.arguments.get("tokenizer")
        if not strings or tokenizer is None:
            return []
        self.arguments["stop_strings"] = None
        return [StopStringCriteria(tokenizer, strings)]

    def mask(self, ids: torch.Tensor) -> torch.Tensor | None:
        """[B, n] of the padding in `ids`: the one that was given, or else what generate reads from the padding token,
        unless that is an end of text, too. None: there is none."""
        given: torch.Tensor | None = self.arguments.get("attention_mask")
        pad, ends = self.of("pad_token_id"), self.of("eos_token_id")
        if given is not None or pad is None or pad in (ends if isinstance(ends, list | tuple) else [ends]):
            return given
        mask = ids.ne(pad)
        return None if bool(mask.all()) else mask.long()


def _refused(what: str, why: str, fix: str) -> Unsupported:
    return Unsupported("SW-717", what=f"generate cannot be used with {what}", why=why, fix=fix)
