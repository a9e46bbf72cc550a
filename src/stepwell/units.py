"""Sizes and durations as people write them.

Used by the configuration, the command line and messages. Numbers inside the program are plain bytes (int) and seconds
(float); text exists only at the edges. Standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from stepwell.errors import ConfigError

_BINARY = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50}
_SIZES = (
    {f"{letter}ib" if letter else "": scale for letter, scale in _BINARY.items()}
    | {f"{letter}b": 1000**power for power, letter in enumerate(_BINARY)}
    | _BINARY
)
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
# Bounded digits: a number from a file must not make us compute for long or overflow a float.
_NUMBER = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)")
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,9})?)\s*%")
_MAX_BYTES = (1 << 63) - 1
_MAX_SECONDS = 100 * 365 * 86400.0


def parse_size(value: str | int) -> int:
    """Bytes meant by `value`: "64GiB", "10G", "80m", "512 KiB", "1.5TB", "4096" or an int.

    `KiB, MiB, GiB, TiB, PiB` are powers of 1024; `KB, MB, GB, TB, PB` are powers of 1000; a bare letter is binary, as
    most engines read it. Case does not matter; a fraction of a byte is cut off. Raises ConfigError SW-102 for anything
    else, 0 and negative values included: no size in stepwell may be empty.
    """
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value.strip())
        scale = _SIZES.get(match[2].lower()) if match else None
        if match is None or scale is None:
            raise _not("a size", value, "write a number and a unit, for example 64GiB, 10G or 512MiB")
        size = int(Decimal(match[1]) * scale)
    elif isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        raise _not("a size", value, "write a number and a unit, for example 64GiB, or a whole number of bytes")
    if not 0 < size <= _MAX_BYTES:
        raise _not("a size", value, "write a size of at least one byte and less than 8 EiB, for example 64GiB")
    return size


@dataclass(frozen=True, slots=True)
class Amount:
    """Either a size in bytes, or a per cent (over 0, at most 100) of a whole that is known only where it is used.

    `str()` is what a person would write: `parse_amount` reads it back as the same amount.
    """

    size: int | None = None
    percent: Decimal | None = None

    def __post_init__(self) -> None:
        if (self.size is None) == (self.percent is None):
            raise ValueError("an amount is a size or a per cent")
        if self.size is not None and self.size < 0:
            raise ValueError(f"an amount of {self.size} bytes")
        if self.percent is not None and not 0 < self.percent <= 100:
            raise ValueError(f"an amount of {self.percent} per cent")

    def of(self, whole: int) -> int:
        """Bytes meant where the whole has `whole` bytes (>= 0), rounded down. A size is itself, also if it is more."""
        if self.percent is None:
            assert self.size is not None
            return self.size
        numerator, denominator = self.percent.as_integer_ratio()
        return whole * numerator // (100 * denominator)

    def __str__(self) -> str:
        if self.percent is not None:
            return f"{self.percent.normalize():f}%"
        assert self.size is not None
        short = format_size(self.size)
        match = _NUMBER.fullmatch(short)
        assert match is not None
        exact = Decimal(match[1]) * _SIZES[match[2].lower()] == self.size
        return short if exact else str(self.size)


def parse_amount(value: str | int | Amount) -> Amount:
    """The amount meant by `value`: "25%", "0.5 %", or a size as `parse_size` reads it. An Amount is itself.

    Raises ConfigError SW-102 for anything else, 0% and more than 100% included.
    """
    if isinstance(value, Amount):
        return value
    if not (isinstance(value, str) and value.rstrip().endswith("%")):
        return Amount(size=parse_size(value))
    match = _PERCENT.fullmatch(value.strip())
    percent = Decimal(match[1]) if match else Decimal(0)
    if not 0 < percent <= 100:
        raise _not("a per cent", value, "write more than 0% and at most 100%, for example 25%")
    return Amount(percent=percent)


def parse_duration(value: str | int | float) -> float:
    """Seconds meant by `value`: "10m", "60s", "250ms", "1.5h", "2d", or a number of seconds (also as text).

    Zero is a duration. Raises ConfigError SW-102 for anything else: negative, NaN, infinite, over 100 years.
    """
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value.strip())
        scale = _SECONDS.get(match[2].lower() or "s") if match else None
        if match is None or scale is None:
            raise _not("a duration", value, "write a number and one of us, ms, s, m, h, d, for example 10m or 250ms")
        seconds = float(match[1]) * scale
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value) if abs(value) <= _MAX_SECONDS else math.inf
    else:
        raise _not("a duration", value, "write a number of seconds, or a number with a unit, for example 10m")
    if not 0 <= seconds <= _MAX_SECONDS:
        raise _not("a duration", value, "write a duration from 0s to 100 years, for example 10m")
    return seconds


def format_size(size: int) -> str:
    """`size` bytes (>= 0) in the largest binary unit that fits, with at most two decimals: "64GiB", "1.5MiB", "12B"."""
    units = [("B", 1), *((f"{letter.upper()}iB", scale) for letter, scale in _BINARY.items() if letter)]
    return _format(size, units)


def format_duration(seconds: float) -> str:
    """`seconds` (>= 0) in the largest unit that fits, with at most two decimals: "10m", "1.5h", "250ms", "0s"."""
    return _format(seconds, list(_SECONDS.items())) if seconds else "0s"


def _format(value: float, units: Sequence[tuple[str, float]]) -> str:
    name, scale = units[0]
    for larger, threshold in units[1:]:
        # Compare what will be printed, or a value just below the threshold would show as "1024KiB".
        if round(value / scale, 2) * scale < threshold:
            break
        name, scale = larger, threshold
    return f"{value / scale:.2f}".rstrip("0").rstrip(".") + name


def _not(kind: str, value: object, fix: str) -> ConfigError:
    if isinstance(value, int) and abs(value) > _MAX_BYTES:
        shown = "this huge number"  # Python refuses to print the largest ones
    elif isinstance(value, (str, int, float)):
        shown = repr(value)[:80]
    else:
        shown = f"a value of type {type(value).__name__}"
    return ConfigError("SW-102", what=f"{shown} is not {kind}", why="its form, unit or range is not accepted", fix=fix)
