"""A user's own documents: what a line may be, and what is said of one that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepwell.errors import ConfigError
from stepwell.fidelity.tasks import own
from tests.longctx.tiny_text import tiny_text


def read(tmp_path: Path, *lines: object) -> list[own.Own]:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return own.read(path, tiny_text())


@pytest.mark.parametrize(
    ("gold", "continuation", "said", "fields"),
    [
        (
            {"name": 'O"Neill', "age": 41},
            None,
            '{"name": "O\\"Neill", "age": "41"}',
            {"name": 'O\\"Neill', "age": "41"},
        ),
        (["a b", "c"], None, '["a b", "c"]', {"0": "a b", "1": "c"}),
        ([{"x": "1"}, {"x": "2"}], None, '[{"x": "1"}, {"x": "2"}]', {"0.x": "1", "1.x": "2"}),
        ({"who": "Ann", "ok": True}, "{{{who}}} said {ok}", "{Ann} said true", {"who": "Ann", "ok": "true"}),
    ],
)
def test_gold_becomes_the_continuation(
    tmp_path: Path, gold: object, continuation: str | None, said: str, fields: dict[str, str]
) -> None:
    line = {"prompt": "Who?", "gold": gold, "task": "mine"} | ({"continuation": continuation} if continuation else {})
    [one] = read(tmp_path, line)
    text = tiny_text()
    assert text.decode(one.document.prompt) == "Who?" and one.task == "mine"
    assert text.decode(one.document.continuation) == said
    found = {
        field.name: text.decode(one.document.continuation[field.start : field.stop]) for field in one.document.fields
    }
    assert found == fields


def test_empty_lines_count_but_are_skipped(tmp_path: Path) -> None:
    line = {"prompt": "Who?", "gold": {"a": "b"}}
    assert [one.line for one in read(tmp_path, line, "", line)] == [1, 3]


def test_a_mark_before_the_first_line_is_no_part_of_it(tmp_path: Path) -> None:
    assert [one.line for one in read(tmp_path, '\ufeff{"prompt": "Who?", "gold": {"a": "b"}}')] == [1]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "truncated"),
        ("[1]", "Expected `object`"),
        ({"gold": {"a": "b"}}, "missing required field `prompt`"),
        ({"prompt": "p" * 9}, "missing required field `gold`"),
        ({"prompt": "p" * 9, "gold": {"a": None}}, r"\$.gold"),
        ({"prompt": 1, "gold": {"a": "b"}}, r"\$.prompt"),
        ({"prompt": "p" * 9, "gold": {"a": "b"}, "depth": 1}, "unknown field `depth`"),
        ({"prompt": "p" * 9, "gold": {}}, "its gold is empty"),
        ({"prompt": "p" * 9, "gold": {"a": ""}}, "its gold is empty"),
        ({"prompt": "p", "gold": {"a": "b"}}, "fewer than 2 tokens"),
        ({"prompt": "p" * 9, "gold": {"a": "b"}, "continuation": "{c}"}, "it asks for {c}; gold has a"),
        ({"prompt": "p" * 9, "gold": {"a": "b"}, "continuation": "{a:>9}"}, "it asks for {a}"),
        ({"prompt": "p" * 9, "gold": {"a": "b"}, "continuation": "{a"}, "expected '}'"),
        ({"prompt": "p" * 9, "gold": {"a": "b"}, "continuation": "nothing"}, "uses none of it"),
        ({"prompt": "p" * 9, "gold": ["b"], "continuation": "{a}"}, "only a gold object"),
        ({"prompt": "p" * 9, "gold": ["b", {"a": "c"}]}, "either objects or texts"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, why: str) -> None:
    good = {"prompt": "Who?", "gold": {"a": "b"}}
    with pytest.raises(ConfigError, match=f"line 2 of .*{why}.*SW-128"):
        read(tmp_path, good, line)


def test_a_file_that_is_not_there_or_empty_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read.*SW-128"):
        own.read(tmp_path / "none.jsonl", tiny_text())
    with pytest.raises(ConfigError, match=r"has no tasks.*SW-128"):
        read(tmp_path, "", "")
