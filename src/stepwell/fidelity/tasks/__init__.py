"""The tasks, by name: seeded, downloading nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

from stepwell.errors import ConfigError
from stepwell.fidelity.document import Document
from stepwell.fidelity.tasks.base import FidelityTask
from stepwell.fidelity.tasks.hidden import CopySpan, MultiNeedle, Passkey, VariableTracking
from stepwell.fidelity.tasks.json_extract import JsonExtract
from stepwell.fidelity.tasks.nat import Nat
from stepwell.fidelity.tasks.tables import KVTable, MultiTurn
from stepwell.fidelity.text import Text

TASKS: dict[str, Callable[..., FidelityTask]] = {
    "kvtable": KVTable,
    "json_extract": JsonExtract,
    "multi_needle": MultiNeedle,
    "variable_tracking": VariableTracking,
    "copy_span": CopySpan,
    "multi_turn": MultiTurn,
    "nat": Nat,
    "passkey": Passkey,
}
_NAME = re.compile(r"(\w+)(?:\((\d+)\))?")


def named(name: str) -> FidelityTask:
    """A task, as `kvtable`, or with its first number as `kvtable(32)`. Raises ConfigError SW-128."""
    match = _NAME.fullmatch(name)
    if match is None or match[1] not in TASKS or (match[2] and not int(match[2])):
        raise ConfigError(
            "SW-128",
            what=f"no task is called {name}",
            why=f"there are {', '.join(TASKS)}; a number above 0 in parentheses sets how much of it",
            fix="name some of them, such as --tasks-named 'kvtable(32),nat'",
        )
    return TASKS[match[1]](int(match[2])) if match[2] else TASKS[match[1]]()


def base_name(name: str) -> str:
    """The task's name without its number."""
    return name.partition("(")[0]


def document(name: str, text: Text, tokens: int, seed: int, number: int) -> Document:
    """Document `number` of a seed: always the same for the same tokenizer (and, for English, the same Python)."""
    return named(name).document(text, tokens, Random(f"{name}/{tokens}/{seed}/{number}"))
