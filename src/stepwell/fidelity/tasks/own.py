"""A user's own documents, from a file with one JSON object a line:

    {"prompt": TEXT, "gold": {FIELD: TEXT, ...}, "continuation": TEMPLATE, "task": NAME}

`gold` is an object, or a list of objects or of texts; numbers and booleans may stand for texts. `continuation` may be
left out: then the gold as JSON follows the prompt, as an answer is to look like. It may be a text with {FIELD} where
each field's gold belongs, for a gold object; {{ and }} stand for braces. `task` names the rows; "own" if left out.
Everything is teacher-forced, so each field's tokens are scored by themselves.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stepwell.errors import ConfigError
from stepwell.fidelity.document import Document
from stepwell.fidelity.tasks.base import Draft
from stepwell.fidelity.tasks.json_extract import as_json, quoted
from stepwell.fidelity.text import Text

Scalar = str | int | float | bool
MIN_PROMPT = 2
_MARK = b"\xef\xbb\xbf"
"""Byte order mark, which some editors put before UTF-8."""


class OwnTaskLine(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str
    gold: dict[str, Scalar] | list[dict[str, Scalar] | str]
    continuation: str | None = None
    task: str = "own"


@dataclass(frozen=True, slots=True)
class Own:
    """A document of the file. `line`: its number, from 1."""

    task: str
    line: int
    document: Document


def read(path: Path, text: Text) -> list[Own]:
    """Raises ConfigError SW-128, which names the line."""
    try:
        content = path.read_bytes().removeprefix(_MARK)
    except OSError as error:
        raise _unusable(f"{path} cannot be read", error.strerror or str(error)) from error
    found = [_own(path, at, line, text) for at, line in enumerate(content.splitlines(), 1) if line.strip()]
    if not found:
        raise _unusable(f"{path} has no tasks", "all of its lines are empty")
    return found


def _own(path: Path, at: int, raw: bytes, text: Text) -> Own:
    where = f"line {at} of {path}"
    try:
        line = msgspec.json.decode(raw, type=OwnTaskLine)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _unusable(f"{where} is not a task", str(error)) from error
    try:
        draft = _continuation(line)
    except (ValueError, KeyError, IndexError, AttributeError) as error:
        raise _unusable(f"the continuation of {where} cannot be filled in", _said(error)) from error
    if not draft.marks:
        raise _unusable(f"{where} has nothing to score", "its gold is empty, or its continuation uses none of it")
    prompt, continuation = text.encode(line.prompt, first=True), text.encode(draft.text)
    if len(prompt.ids) < MIN_PROMPT:
        raise _unusable(f"the prompt of {where} is too short", f"it has fewer than {MIN_PROMPT} tokens")
    fields = draft.fields(continuation)
    return Own(line.task, at, Document(prompt.ids, continuation.ids, fields, intensity=len(fields)))


def _continuation(line: OwnTaskLine) -> Draft:
    if line.continuation is not None:
        if not isinstance(line.gold, dict):
            raise ValueError("only a gold object has fields to put into it")
        return _filled(line.continuation, line.gold)
    if isinstance(line.gold, dict):
        one = as_json([_texts(line.gold)])
        return _without_brackets(one)
    if all(isinstance(item, dict) for item in line.gold):
        return as_json([_texts(item) for item in line.gold if isinstance(item, dict)])
    draft = Draft()
    for at, item in enumerate(line.gold):
        if isinstance(item, dict):
            raise ValueError("a gold list has either objects or texts")
        draft.add(', "' if at else '["').add(quoted(item)[1:-1], "field" if item else "", str(at)).add('"')
    return draft.add("]")


def _filled(template: str, gold: dict[str, Scalar]) -> Draft:
    draft = Draft()
    for literal, name, spec, conversion in string.Formatter().parse(template):
        draft.add(literal)
        if name is None:
            continue
        if name not in gold or spec or conversion:
            raise ValueError(f"it asks for {{{name}}}; gold has {', '.join(sorted(gold))}")
        value = _text(gold[name])
        draft.add(value, "field" if value else "", name)
    return draft


def _without_brackets(listed: Draft) -> Draft:
    """The one object of a list; its fields lose the item's number."""
    marks = [(kind, name.partition(".")[2], (a - 1, b - 1)) for kind, name, (a, b) in listed.marks]
    return Draft(listed.text[1:-1], marks)


def _texts(item: dict[str, Scalar]) -> dict[str, str]:
    return {key: _text(value) for key, value in item.items()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


def _unusable(what: str, why: str) -> ConfigError:
    return ConfigError(
        "SW-128",
        what=what,
        why=why,
        fix='give one JSON object a line: {"prompt": TEXT, "gold": {FIELD: TEXT}}; docs/fidelity.md has examples',
    )
