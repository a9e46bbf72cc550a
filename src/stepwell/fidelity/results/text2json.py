"""Agreement of a generated JSON list of objects with the gold one: the score of the Text2JSON set (arXiv 2604.08426),
written from its description. For models that can generate such lists: the tasks here are teacher-forced."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

MISSING, WRONG = 0.5, 0.25
_APOSTROPHES = str.maketrans({"’": "'", "‘": "'", "ʼ": "'", "`": "'"})


def score(answer: str, gold: Sequence[Mapping[str, Any]], key: str = "name") -> float:
    """Score of one answer, 0 to 1: items are matched by exactly equal `key`; a matched one is worth 1, less 1/2 for
    each key that it lacks and 1/4 for each wrong value, not below 0; the sum is divided by the number of names in
    either list. 0 for an answer without exactly one list that can be read. Apostrophes of all kinds are alike."""
    items = _only_list(answer)
    if items is None:
        return 0.0
    wanted = {_plain(item.get(key)): item for item in gold}
    found = {_plain(item.get(key)): item for item in items if isinstance(item, dict)}
    strangers = sum(not isinstance(item, dict) for item in items)
    union = len(wanted.keys() | found.keys()) + strangers
    return sum(_item(found[name], wanted[name]) for name in wanted.keys() & found.keys()) / union if union else 1.0


def mean_score(answers: Sequence[str], golds: Sequence[Sequence[Mapping[str, Any]]], key: str = "name") -> float:
    """Mean score in percent, the published unit. Raises ValueError for no answers or unequal numbers."""
    if not answers:
        raise ValueError("nothing was answered")
    return 100 * sum(score(a, g, key) for a, g in zip(answers, golds, strict=True)) / len(answers)


def _item(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> float:
    lost = sum(MISSING if k not in found else WRONG * (_plain(found[k]) != _plain(wanted[k])) for k in wanted)
    return max(0.0, 1 - lost)


def _only_list(answer: str) -> list[Any] | None:
    """The text from the first [ to the last ], if it is one list."""
    start, stop = answer.find("["), answer.rfind("]")
    if start < 0 or stop < start:
        return None
    try:
        found = json.loads(answer[start : stop + 1])
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None


def _plain(value: Any) -> str:
    return str(value).translate(_APOSTROPHES)
