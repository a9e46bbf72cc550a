"""What every byte of a KV cache must be, worked out from tokens alone.

A stand-in for the model: the KV of a token is a hash of (weights, shard, layer, all tokens up to and including it), and
the next token is a hash of all tokens before it. So the content of any page can be checked without having kept a copy,
generation is deterministic, and tokens do not depend on the weights while KV does. The harness writes and checks KV
with it; tests may ask it for a reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
POISON = np.uint64(0xA5A5_A5A5_A5A5_A5A5)  # what a page holds between its allocation and its first write

_MASK = (1 << 64) - 1
_ODD = 0x9E37_79B9_7F4A_7C15
_MUL1, _MUL2 = 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB


def _mix(x: int) -> int:
    """The splitmix64 finaliser (Steele, Lea and Flood, 2014)."""
    x = ((x ^ (x >> 30)) * _MUL1) & _MASK
    x = ((x ^ (x >> 27)) * _MUL2) & _MASK
    return x ^ (x >> 31)


def _mix_words(x: Words) -> Words:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MUL1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MUL2)
    return x ^ (x >> np.uint64(31))


class TokenChain:
    """A prompt and the tokens that follow from it, with the hash of each prefix; it grows on demand."""

    def __init__(self, prompt: Sequence[int], vocab: int) -> None:
        self.prompt_len = len(prompt)
        self._vocab = vocab
        self._tokens: list[int] = []
        self._hashes: list[int] = []
        for token in prompt:
            self._append(token)

    def _append(self, token: int) -> None:
        parent = self._hashes[-1] if self._hashes else 0
        self._tokens.append(token)
        self._hashes.append(_mix((parent * 3 + _ODD * (token + 1)) & _MASK))

    def _grow(self, length: int) -> None:
        while len(self._tokens) < length:
            self._append(_mix(self._hashes[-1] ^ _ODD) % self._vocab)

    def token(self, position: int) -> int:
        """The token at a position; past the prompt, the one generation gives."""
        self._grow(position + 1)
        return self._tokens[position]

    def output(self, count: int) -> list[int]:
        """The first `count` generated tokens."""
        self._grow(self.prompt_len + count)
        return self._tokens[self.prompt_len : self.prompt_len + count]

    def hashes(self, start: int, stop: int) -> Words:
        """Prefix hashes of the positions `[start, stop)`."""
        self._grow(stop)
        return np.array(self._hashes[start:stop], dtype=np.uint64)


class Oracle:
    """The KV of one model: `weights` names its parameters, `heads` x `words` 64-bit words a token, layer and rank."""

    def __init__(self, *, weights: int, heads: int, words: int, vocab: int) -> None:
        self.weights = weights
        self._heads, self._words, self._vocab = heads, words, vocab
        self._chains: dict[tuple[int, ...], TokenChain] = {}

    def chain(self, prompt: Sequence[int]) -> TokenChain:
        key = tuple(prompt)
        if key not in self._chains:
            self._chains[key] = TokenChain(key, self._vocab)
        return self._chains[key]

    def rows(self, hashes: Words, layer: int, rank: int) -> Words:
        """KV of tokens with these prefix hashes, shape `(tokens, heads, words)`."""
        seed = _mix((self.weights << 32) ^ (rank << 16) ^ layer ^ _ODD)
        lane = np.arange(1, self._heads * self._words + 1, dtype=np.uint64) * np.uint64(_ODD) ^ np.uint64(seed)
        return _mix_words(hashes[:, None] + lane[None, :]).reshape(-1, self._heads, self._words)

    def expected(self, tokens: Sequence[int], upto: int, layer: int, rank: int = 0) -> Words:
        """KV of the first `upto` of these tokens, whatever was prompt and whatever generated."""
        return self.rows(self.chain(tokens).hashes(0, upto), layer, rank)
