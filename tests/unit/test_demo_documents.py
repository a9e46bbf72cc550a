"""The demo's documents and model folder: the promised lengths, the same choice each time, clear refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell.demo import documents, model
from stepwell.demo.run import DemoOptions, engine_arguments
from stepwell.errors import ConfigError

_WORD = re.compile(r"\w+|\W")


def encode(text: str) -> list[int]:
    """A real, if simple, tokenizer: one token a word or sign."""
    return [sum(word.encode()) + len(word) for word in _WORD.findall(text)]


@pytest.mark.parametrize("page", [32, 96, 128])
@pytest.mark.parametrize("count", [3, 8, 24])
def test_lengths_are_as_promised(count: int, page: int) -> None:
    chosen = documents.choose(encode, count, page)
    assert len(chosen) == count
    assert len({document.name for document in chosen}) == count
    for document in chosen:
        assert documents.MIN_TOKENS <= document.tokens <= documents.MAX_TOKENS
        assert 0 < len(document.prompt) - document.tokens <= documents.QUESTION_TOKENS
        assert len(document.prompt) % page != 0
        assert len(document.prompt) % 32 != 0


def test_the_choice_is_the_same_each_time_and_a_prefix_of_a_larger_one() -> None:
    assert documents.choose(encode, 4, 128) == documents.choose(encode, 8, 128)[:4]


def test_documents_differ_within_their_first_block() -> None:
    chosen = documents.choose(encode, 8, 128)
    assert len({document.prompt[:32] for document in chosen}) == 8


def test_the_question_comes_last_and_names_its_document() -> None:
    chosen = documents.choose(encode, 2, 128)
    question = encode(f"\n\nQuestion: what is the module {chosen[1].name} for?\nAnswer:")
    assert list(chosen[1].prompt[chosen[1].tokens :]) == question


def texts(*lengths: int) -> Iterator[tuple[str, str]]:
    for number, length in enumerate(lengths):
        yield f"text{number}", "word " * (length // 2)


def test_short_texts_are_passed_over() -> None:
    chosen = documents.choose(encode, 2, 128, texts(100, 4000, 2500, 5000))
    assert [document.name for document in chosen] == ["text1", "text3"]


def test_too_few_documents_are_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="only 1 of 2") as caught:
        documents.choose(encode, 2, 128, texts(100, 4000))
    assert caught.value.code == "SW-112"


def test_the_models_own_tokenizer_is_used(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"deep": 4, "well": 5, "?": 0}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    assert documents.load_encoder(tmp_path)("deep deep well") == [4, 4, 5]


def test_a_broken_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError) as caught:
        documents.load_encoder(tmp_path)
    assert caught.value.code == "SW-112"


def whole_model(folder: Path) -> Path:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_whole_model_folder_is_taken(tmp_path: Path) -> None:
    assert model.check(whole_model(tmp_path)) == tmp_path


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_model_folder_with_a_part_missing_is_refused_by_name(tmp_path: Path, missing: str) -> None:
    (whole_model(tmp_path) / missing).unlink()
    with pytest.raises(ConfigError, match=missing.replace("model", "")) as caught:
        model.check(tmp_path)
    assert caught.value.code == "SW-112"


@pytest.mark.parametrize("text", ["", "[]", '{"a": '])
def test_a_broken_config_is_refused(tmp_path: Path, text: str) -> None:
    (whole_model(tmp_path) / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        model.check(tmp_path)


def test_no_such_model_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        model.check(tmp_path / "none")


def test_kv_bytes_per_token() -> None:
    llama = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    assert model.kv_bytes_per_token(llama) == 23040
    assert model.kv_bytes_per_token({**llama, "head_dim": 128}) == 46080
    assert model.kv_bytes_per_token({"num_hidden_layers": 30}) is None


@pytest.mark.parametrize(("base", "kept"), [("/var/tmp/x", True), ("relative", False), ("", False)])
def test_the_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, base: str, kept: bool) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(model.cache_folder()) == ("/var/tmp/x/stepwell" if kept else "/home/someone/.cache/stepwell")


@pytest.mark.parametrize("bad", [{"documents": 2}, {"page": 100}, {"page": 0}, {"rounds": 0}])
def test_options_out_of_range_are_refused_before_anything_starts(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))) as caught:
        DemoOptions(**bad)  # type: ignore[arg-type]
    assert caught.value.code == "SW-102"


def test_engine_arguments_are_a_json_object() -> None:
    assert engine_arguments('{"dtype": "float32"}') == {"dtype": "float32"}
    for bad in ("dtype=float32", '["dtype"]', ""):
        with pytest.raises(ConfigError, match="--engine") as caught:
            engine_arguments(bad)
        assert caught.value.code == "SW-102"
