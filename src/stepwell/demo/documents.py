"""The demo's documents: sources of standard-library modules, which every machine has, each with a question behind it.

Chosen by name and cut by the model's own tokenizer, so that the same interpreter and model give the same prompts. No
prompt is a multiple of 32 tokens or of the page: of such a prompt an engine's own hit leaves out the last page, and it
could not be compared with a recall.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stepwell.errors import ConfigError

MIN_TOKENS, MAX_TOKENS = 2000, 3000
QUESTION_TOKENS = 32
# With much prose first; the rest of the library follows by name, for more documents or a library without these.
PREFERRED = (
    "argparse",
    "calendar",
    "difflib",
    "configparser",
    "fractions",
    "heapq",
    "optparse",
    "random",
    "statistics",
    "tarfile",
    "textwrap",
    "threading",
    "zipfile",
    "cmd",
    "csv",
    "doctest",
)
_CHARACTERS_READ = 40_000

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class DemoDocument:
    """A document with its question. `prompt`: the document's `tokens` tokens, then the question's."""

    name: str
    tokens: int
    prompt: tuple[int, ...]


def load_encoder(model: Path) -> Encode:
    """The model's tokenizer, without special tokens. Raises ConfigError SW-112 or SW-113."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            "SW-113",
            what="the package tokenizers is not installed",
            why="the demo cuts its documents with the model's tokenizer",
            fix="run `make setup` in a clone, or install vLLM, which depends on it",
        ) from error
    try:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception for an unreadable file
        raise ConfigError(
            "SW-112",
            what=f"{model / 'tokenizer.json'} cannot be used",
            why=str(error),
            fix="name a model folder with a tokenizer.json of the tokenizers library",
        ) from error

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return encode


def choose(encode: Encode, count: int, page: int, texts: Iterator[tuple[str, str]] | None = None) -> list[DemoDocument]:
    """The first `count` documents of 2,000 to 3,000 tokens, of various lengths.

    `texts` gives (name, text); by default the standard library's. Raises ConfigError SW-112 if there are too few.
    """
    chosen: list[DemoDocument] = []
    for name, text in texts if texts is not None else library_texts():
        if len(chosen) == count:
            break
        # The name first: documents that begin alike would share their first block.
        ids = encode(f"{name}.py\n\n{text[:_CHARACTERS_READ]}")
        if len(ids) >= MAX_TOKENS:
            chosen.append(_cut(name, ids, encode, page, wanted=MIN_TOKENS + 20 + 131 * len(chosen) % 900))
    if len(chosen) < count:
        raise ConfigError(
            "SW-112",
            what=f"only {len(chosen)} of {count} documents were found",
            why="the sources of Python's standard library are too few here, or not installed",
            fix="ask for fewer documents, or run the demo with a Python that has its library's sources",
        )
    return chosen


def library_texts() -> Iterator[tuple[str, str]]:
    """(module name, source) of top-level modules of this interpreter's standard library, in a fixed order."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = {path.stem: path for path in folder.glob("*.py")}
    rest = sorted(found.keys() - set(PREFERRED))
    for name in (*(name for name in PREFERRED if name in found), *rest):
        try:
            yield name, found[name].read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # not readable here: the next one will do


def _cut(name: str, ids: list[int], encode: Encode, page: int, wanted: int) -> DemoDocument:
    question = encode(f"\n\nQuestion: what is the module {name} for?\nAnswer:")[-QUESTION_TOKENS:]
    tokens = wanted
    while (tokens + len(question)) % 32 == 0 or (tokens + len(question)) % page == 0:
        tokens += 1
    return DemoDocument(name, tokens, (*ids[:tokens], *question))
