"""What a model keeps of a block: layers that need every token, and windows or states beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from stepwell.block.groups import GroupKind, GroupRule
from stepwell.errors import ConfigError
from stepwell.simulate.optimal import OPTIMAL
from stepwell.units import parse_size

FINEST = 64
"""Sizes are told apart to so small a part of a block of the layers that need every token."""


@dataclass(frozen=True, slots=True)
class ModelGroups:
    """`full_bytes` of a token in layers that need every token; `windows`, each with its span in tokens and bytes of a
    token; `states`, bytes of each."""

    full_bytes: int
    windows: tuple[tuple[int, int], ...] = ()
    states: tuple[int, ...] = ()

    def rules(self, block_tokens: int) -> list[GroupRule]:
        """Those of the tail."""
        windows = [GroupRule(GroupKind.WINDOW, block_tokens, span) for span, _ in self.windows]
        return windows + [GroupRule(GroupKind.STATE, block_tokens) for _ in self.states]

    def sizes(self, block_tokens: int) -> tuple[int, list[int]]:
        """Sizes of a block of the prefix, and of one of each rule's, in a unit that divides all of them. Raises
        ConfigError SW-138 where one of them is so small that it would not count."""
        of_block = self.full_bytes * block_tokens
        tails = [nbytes * block_tokens for _, nbytes in self.windows] + list(self.states)
        shares = [Fraction(n, of_block).limit_denominator(FINEST) for n in tails]
        if not all(shares):
            raise _unusable(f"{min(tails)} bytes of a block in a window or a state, beside {of_block} in other layers,",
                            f"less than a {2 * FINEST}th of them makes no difference", "leave it out")  # fmt: skip
        unit = math.lcm(*(share.denominator for share in shares))
        return unit, [int(share * unit) for share in shares]


def model_groups(
    full: str | None, windows: Sequence[str], states: Sequence[str], policies: Sequence[str]
) -> ModelGroups | None:
    """What these options say; None where they say nothing. Raises ConfigError SW-138, also where one of the policies
    cannot be replayed for such a model."""
    if full is None:
        if windows or states:
            raise _unusable("a window or a state", "it is not said what a token takes in layers that need every token",
                            "name it: --full 20KiB")  # fmt: skip
        return None
    if OPTIMAL in policies:
        raise _unusable(f"the policy {OPTIMAL}", "what is best is known only of models without windows and states",
                        "leave it out, or --full")  # fmt: skip
    return ModelGroups(_size(full), tuple(map(_window, windows)), tuple(map(_size, states)))


def _window(text: str) -> tuple[int, int]:
    span, _, size = text.partition(":")
    if not span.strip().isdecimal() or not 1 <= int(span) <= 1 << 26 or not size:
        raise _unusable(f"a window of {text[:80]!r}", "it does not name tokens and bytes", "name both, as 1024:100KiB")
    return int(span), _size(size)


def _size(text: str) -> int:
    try:
        nbytes = parse_size(text)
    except ConfigError as error:
        raise _unusable(f"a size of {text[:80]!r}", error.why, "name bytes, as 20KiB") from None
    if not 1 <= nbytes <= 1 << 40:
        raise _unusable(f"a size of {text[:80]!r}", "it is not from one byte to 1 TiB", "name bytes, as 20KiB")
    return nbytes


def _unusable(what: str, why: str, fix: str) -> ConfigError:
    return ConfigError("SW-138", what=f"{what} cannot be simulated", why=why, fix=fix)
