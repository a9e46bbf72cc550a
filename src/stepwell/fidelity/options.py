"""Parameters of a comparison: policies, budgets and lengths, as a person writes them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stepwell.errors import ConfigError

FULL, ORACLE, RECENCY, RANDOM = "full", "oracle", "recency", "random"
CONTROLS = (FULL, ORACLE, RECENCY, RANDOM)
_CONFIG = re.compile(r"([\w.-]+)(?::(token|page(\d+)))?")
_LENGTH = re.compile(r"(\d+)([kK]?)")
MIN_LENGTH = 256


@dataclass(frozen=True, slots=True)
class Config:
    """A policy by name, with pages of another size than its own where that is given."""

    name: str
    page_tokens: int | None = None

    @property
    def control(self) -> bool:
        return self.name in CONTROLS


def configs(listed: str) -> list[Config]:
    """NAME, NAME:token or NAME:page32, separated by commas. Raises ConfigError SW-128."""
    found = []
    for text in _parts(listed, "--policies"):
        match = _CONFIG.fullmatch(text)
        if match is None or match[3] == "0":
            raise _unusable(f"{text!r} is no policy", "a policy is NAME, NAME:token or NAME:page32")
        pages = 1 if match[2] == "token" else int(match[3]) if match[3] else None
        found.append(Config(match[1], pages))
    return found


def shares(listed: str, option: str) -> list[float]:
    """Shares of the context, as 12.5% or 0.125, separated by commas. Raises ConfigError SW-128."""
    found = []
    for text in _parts(listed, option):
        try:
            share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            share = 0.0
        if not 0.0 < share <= 1.0:
            raise _unusable(f"{option} {text!r} is no share of a context", "a share is above 0 and at most 100%")
        found.append(share)
    return found


def lengths(listed: str) -> list[int]:
    """Tokens, as 2048 or 2K, separated by commas. Raises ConfigError SW-128."""
    found = []
    for text in _parts(listed, "--lengths"):
        match = _LENGTH.fullmatch(text)
        tokens = int(match[1]) * (1024 if match[2] else 1) if match else 0
        if tokens < MIN_LENGTH:
            raise _unusable(f"{text!r} is no length of prompts", f"a length is a number of tokens from {MIN_LENGTH} on")
        found.append(tokens)
    return found


def counts(listed: str, option: str) -> list[int]:
    """Numbers above 0, separated by commas. Raises ConfigError SW-128."""
    found = _parts(listed, option)
    if wrong := [text for text in found if not text.isdecimal() or not int(text)]:
        raise _unusable(f"{option} {wrong[0]!r} is no count", "a count is a number above 0")
    return [int(text) for text in found]


def names(listed: str) -> list[str]:
    """Raises ConfigError SW-128 if there is none."""
    return _parts(listed, "--tasks-named")


def _parts(listed: str, option: str) -> list[str]:
    found = list(dict.fromkeys(part.strip() for part in listed.split(",") if part.strip()))
    if not found:
        raise _unusable(f"{option} names nothing", "it was empty")
    return found


def _unusable(what: str, why: str) -> ConfigError:
    return ConfigError("SW-128", what=what, why=why, fix="see `stepwell fidelity --help`")
