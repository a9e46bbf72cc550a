"""English text in every Python: the language reference that `help()` shows, else its library's docstrings.

Nothing of it is kept here. Another version of Python has other texts, so a result names the interpreter's.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from random import Random

from stepwell.demo.documents import library_texts
from stepwell.errors import ConfigError

_MIN_CHARACTERS = 1500
_LONG_CHARACTERS = 700
_BLANK = re.compile(r"\n\s*\n")


@cache
def articles() -> tuple[str, ...]:
    """Articles of at least 1,500 characters each, in a fixed order. Raises ConfigError SW-128 if there is none."""
    found = _reference() or _docstrings()
    if not found:
        raise ConfigError(
            "SW-128",
            what="there is no English text for the documents",
            why="neither pydoc_data nor the sources of Python's standard library are installed here",
            fix="run it with a complete Python, or name texts of your own with --tasks",
        )
    return found


def prose(random: Random, characters: int) -> str:
    """About so many characters: articles in random order, from their beginnings."""
    return "\n\n".join(_paragraphs_of(random, characters))


def paragraphs(random: Random, characters: int) -> list[str]:
    """The same in paragraphs, without long ones, each with the empty line behind it."""
    return [part + "\n\n" for part in _paragraphs_of(random, characters) if len(part) <= _LONG_CHARACTERS]


def _paragraphs_of(random: Random, characters: int) -> list[str]:
    parts: list[str] = []
    length = 0
    while length < characters:
        for article in random.sample(articles(), len(articles())):
            parts += (part.strip("\n") for part in _BLANK.split(article) if part.strip())
            length += len(article)
            if length >= characters:
                break
    return parts


def _reference() -> tuple[str, ...]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return ()
    return tuple(topics[name] for name in sorted(topics) if len(topics[name]) >= _MIN_CHARACTERS)


def _docstrings() -> tuple[str, ...]:
    found = []
    for _, source in library_texts():
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue  # the library has such files, for its own tests
        nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        told = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, nodes))
        whole = "\n\n".join(text for text in told if text)
        if len(whole) >= _MIN_CHARACTERS:
            found.append(whole)
    return tuple(found)
