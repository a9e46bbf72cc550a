"""Which model a library's blocks are of, and which tokens and arrays can be blocks of it. Whatever cannot is refused
before anything else happens, with what to do about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stepwell.block.digest import Chain, salt_extras
from stepwell.block.facts import digest_of
from stepwell.errors import ConfigError

Array = npt.NDArray[Any]
Tokens = Sequence[int] | Array
Blocks = Array | Sequence[Array]
"""One array of shape (blocks, *block_shape), or one array of shape block_shape for each block."""

MAX_TOKEN = (1 << 32) - 1


@dataclass(frozen=True)
class KvModel:
    """The identity of a model's KV: blocks meet only where all five fields are equal.

    name: of the model, for people as well. fingerprint: a text that names exactly these weights and whatever else
    shapes the KV, such as a checksum of the files and the settings; another text is another model. block_shape, dtype:
    of one block's array, for example (layers, 2, block_tokens, heads, head_dim) and "float16". The bytes are kept as
    they are, so numbers that NumPy does not have are stored as whole numbers of their size, bfloat16 as "uint16".
    block_tokens: consecutive tokens in a block. Raises ConfigError SW-136 for what no model has."""

    name: str
    fingerprint: str
    block_shape: tuple[int, ...]
    dtype: npt.DTypeLike
    block_tokens: int

    def __post_init__(self) -> None:
        for field in ("name", "fingerprint"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value:
                raise unusable(
                    f"{field} = {value!r}", "it must be a text that is not empty", f"give the model a {field}"
                )
        try:
            shape, dtype = tuple(map(_whole, self.block_shape)), np.dtype(self.dtype)
        except (TypeError, ValueError) as error:
            raise unusable(
                f"block_shape = {self.block_shape!r}, dtype = {self.dtype!r}",
                str(error),
                "give whole numbers over 0 and a NumPy dtype",
            ) from None
        if not shape or min(shape) < 1 or dtype.hasobject or not dtype.itemsize:
            raise unusable(
                f"block_shape = {shape}, dtype = {dtype}",
                "a block has a fixed number of bytes, and more than 0",
                "give whole numbers over 0 and a dtype of plain numbers",
            )
        if not isinstance(self.block_tokens, int) or self.block_tokens < 1:
            raise unusable(f"block_tokens = {self.block_tokens!r}", "it must be over 0", "give a whole number over 0")
        object.__setattr__(self, "block_shape", shape)
        object.__setattr__(self, "dtype", dtype)

    @property
    def block_bytes(self) -> int:
        return math.prod(self.block_shape) * np.dtype(self.dtype).itemsize

    @property
    def weights_digest(self) -> bytes:
        return digest_of({"library.fingerprint": self.fingerprint})

    @property
    def model_facts(self) -> dict[str, str]:
        return {"library.name": self.name}

    @property
    def layout_facts(self) -> dict[str, str]:
        dtype = np.dtype(self.dtype)
        return {"library.block_shape": repr(self.block_shape), "library.dtype": f"{dtype.str} {dtype.name}"}

    def digests(self, tokens: Tokens, salt: str | None) -> bytes:
        """The digests of all full blocks of these tokens, 32 bytes each. Raises ConfigError SW-136."""
        if salt is not None and not isinstance(salt, str):
            raise unusable(f"salt = {salt!r}", "it must be a text or None", "give a text for each namespace")
        chain = Chain(self.block_tokens, salt_extras(salt))
        chain.extend(self._ids(tokens))
        return chain.digests

    def _ids(self, tokens: Tokens) -> list[int]:
        try:
            ids = np.asarray(tokens)
        except (TypeError, ValueError, OverflowError) as error:
            raise unusable("tokens that are no array", str(error), "give a flat list of whole numbers") from None
        if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
            raise unusable(
                f"tokens of dtype {ids.dtype} and shape {ids.shape}",
                "tokens are one row of whole numbers",
                "give a flat list, or a one-dimensional integer array",
            )
        if len(ids) < self.block_tokens:
            raise unusable(
                f"{len(ids)} tokens",
                f"a block of this model has {self.block_tokens}, and only full blocks are kept",
                f"call this for {self.block_tokens} tokens or more",
            )
        if int(ids.min()) < 0 or int(ids.max()) > MAX_TOKEN:
            raise unusable(
                f"a token id outside 0 to {MAX_TOKEN}",
                "a token is stored in 32 bits",
                "look where this id comes from; padding is no token",
            )
        found: list[int] = ids.tolist()
        return found

    def rows(self, what: str, blocks: Blocks, most: int, first: int, *, writable: bool) -> list[Array]:
        """Each block's array, at most `most` of them behind the first `first` of a prefix. `what` names them in errors.
        Raises ConfigError SW-136."""
        if not isinstance(first, int) or not 0 <= first < most:
            raise unusable(
                f"first = {first!r}",
                f"the tokens fill {most} blocks, so it is one of 0 to {most - 1}",
                "count blocks from 0, and pass all tokens from the beginning of the prompt",
            )
        if isinstance(blocks, np.ndarray) and blocks.shape == self.block_shape and blocks.ndim:
            raise unusable(
                f"{what} of shape {blocks.shape}",
                "this is one block, where a row of blocks is expected",
                f"pass [{what}], or {what}[None]",
            )
        try:
            rows = list(blocks)
        except TypeError:
            raise unusable(
                f"{what} of type {type(blocks).__name__}",
                "this is no row of blocks",
                f"pass a list of arrays, or one array of shape (blocks, {', '.join(map(str, self.block_shape))})",
            ) from None
        if not 1 <= len(rows) <= most - first:
            raise unusable(
                f"{len(rows)} {what}",
                f"the tokens have {most - first} full blocks of {self.block_tokens} tokens from block {first} on",
                "pass one or more, and no more than the tokens fill",
            )
        for number, row in enumerate(rows):
            if why := self._refused(row, writable=writable):
                raise unusable(
                    f"{what}[{number}] cannot be used",
                    why,
                    f"pass{' writable' * writable} contiguous {self.dtype} arrays of shape {self.block_shape}",
                )
        return rows

    def _refused(self, row: object, *, writable: bool) -> str:
        if not isinstance(row, np.ndarray):
            return f"it is no NumPy array but of type {type(row).__name__}"
        if row.dtype != self.dtype:
            return f"its dtype is {row.dtype}"
        if row.shape != self.block_shape:
            return f"its shape is {row.shape}"
        if not row.flags.c_contiguous:
            return "its bytes do not lie in one piece and in order"
        if writable and not row.flags.writeable:
            return "it is read-only"
        return ""


def _whole(number: object) -> int:
    if isinstance(number, bool) or not isinstance(number, int | np.integer):
        raise TypeError(f"{number!r} is no whole number")
    return int(number)


def unusable(what: str, why: str, fix: str) -> ConfigError:
    return ConfigError("SW-136", what=what, why=why, fix=fix)
