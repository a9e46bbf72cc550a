"""The model's tokenizer, with what documents need of it: which tokens stand for which characters."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from stepwell.errors import ConfigError

_WORD = re.compile(r"[Ġ▁]([a-z]{4,9})")


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids, and the characters [start, stop) that each of them stands for. `special`: how many at the beginning
    stand for none."""

    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    special: int = 0

    def last(self, count: int) -> Encoded:
        """The last `count` tokens, with the special ones and the end of the text; all if there are fewer."""
        gone = max(0, len(self.ids) - count)
        kept = slice(self.special + gone, None)
        return Encoded(
            self.ids[: self.special] + self.ids[kept], self.offsets[: self.special] + self.offsets[kept], self.special
        )

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """The tokens [first, last) that have a part in characters [start, stop). Raises ValueError if there are
        none."""
        first = bisect_right(self.offsets, start, lo=self.special, key=itemgetter(1))
        last = bisect_left(self.offsets, stop, lo=self.special, key=itemgetter(0))
        if first >= last:
            raise ValueError(f"no token stands for characters {start} to {stop}")
        return first, last


class Text:
    """A `tokenizers.Tokenizer` as documents see it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._words: tuple[str, ...] | None = None

    @classmethod
    def of_model(cls, folder: Path) -> Text:
        """The tokenizer of a model folder. Raises ConfigError SW-112 or SW-113."""
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(
                "SW-113",
                what="the package tokenizers is not installed",
                why="documents are cut with the model's tokenizer",
                fix="in a clone of stepwell: pip install '.[transformers]'",
            ) from error
        try:
            return cls(Tokenizer.from_file(str(folder / "tokenizer.json")))
        except Exception as error:  # the library raises bare Exception for an unreadable file
            raise ConfigError(
                "SW-112",
                what=f"{folder / 'tokenizer.json'} cannot be used",
                why=str(error),
                fix="name a model folder with a tokenizer.json of the tokenizers library",
            ) from error

    def encode(self, text: str, *, first: bool = False) -> Encoded:
        """Encodes text. `first`: the text begins the sequence, so that the tokenizer's first token (BOS) is included; a
        last one (EOS) is not."""
        found = self._tokenizer.encode(text, add_special_tokens=first)
        ids, offsets = list(found.ids), list(found.offsets)
        while ids and found.special_tokens_mask[len(ids) - 1]:
            ids.pop()
            offsets.pop()
        special = sum(found.special_tokens_mask[: len(ids)])
        return Encoded(tuple(ids), tuple(offsets), special)

    def count(self, text: str) -> int:
        return len(self.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def words(self) -> tuple[str, ...]:
        """English words, or what looks like them, that are one token each within a line; sorted. May be empty."""
        if self._words is None:
            found = (_WORD.fullmatch(token) for token in self._tokenizer.get_vocab())
            self._words = tuple(sorted({match[1] for match in found if match}))
        return self._words
