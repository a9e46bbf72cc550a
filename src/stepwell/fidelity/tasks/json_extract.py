"""Records of names, doses and dates, in sentences or in lists; then some of them as JSON, in another order."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

from stepwell.fidelity.document import Document, far
from stepwell.fidelity.tasks.base import Draft, fill, spans_of, too_short
from stepwell.fidelity.text import Text

_FIRST = (
    "Ada", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Karin", "Leon", "Maria",
    "Nils", "Olga", "Paul", "Rosa", "Simon", "Tanja", "Urs", "Vera", "Walter", "Xenia", "Yusuf", "Zoe",
)  # fmt: skip
_LAST = (
    "Abel", "Berg", "Costa", "Drake", "Engel", "Fuchs", "Grant", "Haas", "Ibsen", "Jung", "Keller", "Lang", "Moser",
    "Novak", "Olsen", "Peters", "Quist", "Roth", "Stein", "Thorn", "Ulrich", "Vogel", "Weber", "Young", "Zeller",
)  # fmt: skip
_MIDDLE = "ABCDEFGHJKLMNPRSTW"
_PROSE = (
    "On {date} the ward noted that {name} receives a dose of {dose}.\n",
    "{name} came on {date}; the dose was set to {dose}.\n",
    "The dose of {name}, last seen on {date}, is {dose}.\n",
)
_LIST = "- name: {name}\n  dose: {dose}\n  date: {date}\n"
_RECORD_TOKENS = 16  # fewer than any record has


@dataclass(frozen=True, slots=True)
class JsonExtract:
    """`asked`: records of the continuation."""

    asked: int = 6
    blind: bool = False

    def document(self, text: Text, tokens: int, random: Random) -> Document:
        records = _records(random, tokens // _RECORD_TOKENS + 1)
        listed = random.random() < 0.5
        told = [(_LIST if listed else random.choice(_PROSE)).format(**record) for record in records]
        tail = "\nAs JSON:\n"
        count = fill(text, told, tokens, tail)
        prompt = text.encode("".join(told[:count]) + tail, first=True).last(tokens)
        spans = spans_of(prompt, told[:count])
        gold = far(spans, len(prompt.ids))
        if len(gold) < self.asked:
            raise too_short("json_extract", tokens, f"only {len(gold)} records may be asked for, not {self.asked}")
        asked = random.sample(gold, self.asked)
        draft = as_json([records[at] for at in asked])
        continuation = text.encode(draft.text)
        sources = [(spans[at],) for at in asked for _ in records[at]]
        # A name is what is asked for; what it has is what must be found.
        marked = [field for field in draft.fields(continuation, sources) if not field.name.endswith(".name")]
        return Document(prompt.ids, continuation.ids, tuple(marked), intensity=self.asked)


def as_json(items: Sequence[Mapping[str, str]]) -> Draft:
    """A JSON list of objects; the text of each value is marked "field", by the name `item.key`."""
    draft = Draft()
    for at, item in enumerate(items):
        draft.add(", {" if at else "[{")
        for number, (key, value) in enumerate(item.items()):
            draft.add(", " if number else "").add(f"{quoted(key)}: ")
            inner = quoted(value)[1:-1]
            draft.add('"').add(inner, "field" if inner else "", f"{at}.{key}").add('"')
        draft.add("}")
    return draft.add("]" if items else "[]")


def quoted(value: str) -> str:
    """A JSON string, of more than ASCII where it has that."""
    return json.dumps(value, ensure_ascii=False)


def _records(random: Random, count: int) -> list[dict[str, str]]:
    names = [f"{first} {middle}. {last}" for first, middle, last in product(_FIRST, _MIDDLE, _LAST)]
    return [
        {
            "name": name,
            "dose": f"{random.randrange(11, 999)} mg",
            "date": f"{random.randrange(1990, 2026)}-{random.randrange(1, 13):02}-{random.randrange(1, 29):02}",
        }
        for name in random.sample(names, count)
    ]
