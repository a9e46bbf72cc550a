"""Tasks make the same documents for the same seed, of the wanted length, and their spans are what they say."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from stepwell.demo.model import DEFAULT_MODEL, cache_folder
from stepwell.errors import ConfigError
from stepwell.fidelity import tasks
from stepwell.fidelity.document import SINKS, WINDOW
from stepwell.fidelity.tasks.hidden import CopySpan, MultiNeedle, VariableTracking
from stepwell.fidelity.tasks.texts.words import words
from stepwell.fidelity.text import Text
from tests.longctx.tiny_text import tiny_text

MODEL = cache_folder() / "models" / DEFAULT_MODEL


@pytest.fixture(params=["bytes", "bytes with BOS", "model"], scope="module")
def text(request: pytest.FixtureRequest) -> Text:
    if request.param != "model":
        return tiny_text(bos=request.param != "bytes")
    if not (MODEL / "tokenizer.json").is_file():
        pytest.skip("the demo's model was not converted on this machine")
    return Text.of_model(MODEL)


@pytest.mark.parametrize("name", tasks.TASKS)
def test_documents_are_of_the_seed_and_their_spans_tell_the_gold(text: Text, name: str) -> None:
    tokens, number = 2000, 1
    found = tasks.document(name, text, tokens, 7, number)
    assert found == tasks.document(name, text, tokens, 7, number)
    assert found.prompt != tasks.document(name, text, tokens, 8, number).prompt
    assert found.tokens == tokens
    assert bool(found.fields) == (name != "nat")
    assert found.intensity > 0 or name == "nat"
    for field in found.fields:
        assert text.decode(found.continuation[field.start : field.stop]).strip() == field.gold.strip()
        assert field.source
        for start, stop in field.source:
            assert start >= SINKS and stop <= tokens - WINDOW
        told = [text.decode(found.prompt[start:stop]) for start, stop in field.source]
        assert any(field.gold.strip() in one or field.name == "span" for one in told)


def test_a_prompt_begins_with_what_the_model_wants_there() -> None:
    bos, none = tiny_text(bos=True), tiny_text()
    assert bos.encode("ab", first=True).ids[0] == 0 and bos.encode("ab").ids[0] != 0
    with_bos, without = (tasks.document("kvtable", each, 1000, 0, 0) for each in (bos, none))
    assert with_bos.prompt[0] == 0 and 0 not in with_bos.prompt[1:]
    assert with_bos.prompt[1:] == without.prompt[1:], "what is too much is cut off behind it"


def test_a_cut_text_keeps_its_spans() -> None:
    whole = tiny_text(bos=True).encode("one two three", first=True)
    cut = whole.last(6)
    assert cut.ids == (0, *whole.ids[-5:])
    assert cut.span(8, 13) == (1, 6)
    assert cut.span(0, 10) == (1, 3), "the rest of what was cut through"
    with pytest.raises(ValueError, match="0 to 3"):
        cut.span(0, 3)


def test_more_facts_can_be_asked_for(text: Text) -> None:
    few, many = (tasks.document(f"kvtable({count})", text, 4000, 0, 0) for count in (2, 40))
    assert (few.intensity, many.intensity) == (2, 40)
    assert len(many.fields) == 40 and len({field.name for field in many.fields}) == 40


def test_a_long_question_cuts_off_nothing_that_is_asked_for() -> None:
    found = tasks.document("multi_turn(50)", tiny_text(), 3000, 0, 0)
    assert len(found.fields) == 50
    assert all(start >= SINKS and stop > start for field in found.fields for start, stop in field.source)


def test_needles_lie_where_they_are_wanted() -> None:
    text = tiny_text()
    for depth in (0.2, 0.5, 0.8):
        found = MultiNeedle(3, depth).document(text, 20_000, Random(1))
        for field in found.fields:
            assert abs(field.source[0][0] / 20_000 - depth) < 0.1


def test_a_chain_is_told_in_order() -> None:
    text = tiny_text()
    found = VariableTracking(chains=3, hops=2).document(text, 8000, Random(0))
    for field in found.fields:
        assert list(field.source) == sorted(field.source) and len(field.source) == 3
        lines = [text.decode(found.prompt[start:stop]).strip() for start, stop in field.source]
        names = [line.partition(" = ")[0] for line in lines]
        assert lines[0].endswith(field.gold)
        assert [line.partition(" = ")[2] for line in lines[1:]] == names[:-1]
        assert field.name == names[-1]


def test_the_copied_span_goes_on_from_its_cue() -> None:
    text = tiny_text()
    found = CopySpan(10).document(text, 4000, Random(0))
    [field] = found.fields
    [(start, stop)] = field.source
    told = text.decode(found.prompt[start:stop]).strip().split()
    said = text.decode(found.prompt[-60:] + found.continuation).split()[-len(told) :]
    assert said == told and len(told) == 14


@pytest.mark.parametrize("name", sorted(tasks.TASKS.keys() - {"nat"}))
def test_a_prompt_that_is_too_short_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"does not fit into 64 tokens.*SW-128"):
        tasks.document(name, tiny_text(), 64, 0, 0)


@pytest.mark.parametrize("name", ["haystack", "kvtable(0)", "kvtable(", "kvtable(x)", ""])
def test_an_unknown_task_is_told_of(name: str) -> None:
    with pytest.raises(ConfigError, match=r"kvtable, json_extract.*SW-128"):
        tasks.named(name)


def test_words_differ() -> None:
    made = words(tiny_text(), Random(0), 500)
    assert len(set(made)) == 500


def test_only_the_pass_key_is_blind() -> None:
    assert [name for name in tasks.TASKS if tasks.named(name).blind] == ["passkey"]


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="SW-112"):
        Text.of_model(tmp_path)
