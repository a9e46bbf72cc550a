"""Requests with a LoRA adapter: blocks are those of its content, whatever it is called. In float32, with random weights
that change every answer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stepwell.demo.engine import EngineProcess
from stepwell.demo.wire import Answer, Question

from .wells import Well, config, eventually, forget, in_one_process, recalled_all, receipt, start, warm_up

PAGE, PROMPT, WHOLE = 128, 530, 512
RANK = 8


def make_adapter(folder: Path, model: Path, seed: int) -> None:
    """In PEFT's form, for K and V of all layers."""
    shape = json.loads((model / "config.json").read_text())
    hidden, heads = shape["hidden_size"], shape["num_key_value_heads"]
    width = heads * shape.get("head_dim", hidden // shape["num_attention_heads"])
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for module in ("k_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, hidden, generator=random) * 0.05
            tensors[f"{name}.lora_B.weight"] = torch.randn(width, RANK, generator=random) * 0.05
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 16,
        "target_modules": ["k_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def adapters(folder: Path, model: Path) -> list[Path]:
    """Two contents; the first one again in another folder."""
    made = [folder / "adapters" / name for name in ("one", "two", "one-again")]
    make_adapter(made[0], model, 1)
    make_adapter(made[1], model, 2)
    shutil.copytree(made[0], made[2])
    return made


def new_engine(model: Path, folder: Path, well: Well, name: str) -> EngineProcess:
    settings = config(
        model, well.connector(), dtype="float32", page=PAGE, pool_pages=8, max_model_len=768,
        extra={"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "max_lora_rank": RANK},
    )  # fmt: skip
    engine = start(in_one_process(settings), folder, name)
    warm_up(engine, PAGE)
    return engine


@pytest.fixture(scope="module")
def engine(model: Path, folder: Path, well: Well) -> Iterator[EngineProcess]:
    with new_engine(model, folder, well, "engine") as engine:
        yield engine


def question(prompt: list[int], adapter: tuple[str, int, str] | None) -> list[Question]:
    return [Question(prompt, 24, adapter=adapter, sampling={"logprobs": 0})]


def served(engine: EngineProcess, well: Well, prompt: list[int], adapter: tuple[str, int, str]) -> Answer:
    """Cold, once its files are known: until then such requests bypass."""

    def spilled() -> bool:
        before = well.stats()["spilled_blocks"]
        engine.ask_all(question([*prompt[:1], *prompt[2:300]], adapter))
        forget(engine)
        return bool(well.stats()["spilled_blocks"] > before) or bool(well.stats().get("hits"))

    eventually(spilled, "requests with the adapter spill")
    return engine.ask_all(question(prompt, adapter))[0]


def test_blocks_are_those_of_the_content(
    engine: EngineProcess, well: Well, texts: list[list[int]], adapters: list[Path], model: Path, folder: Path
) -> None:
    prompt = texts[0][:PROMPT]
    one = ("name", 1, str(adapters[0]))
    plain = engine.ask_all(question(prompt, None))[0]
    first = served(engine, well, prompt, one)
    assert (first.local_tokens, first.external_tokens) == (0, 0), "nothing of the model's own blocks"
    assert first.token_ids != plain.token_ids
    forget(engine)
    again = recalled_all(engine, question(prompt, one))[0]
    hit = engine.ask_all(question(prompt, one))[0]
    assert (again.local_tokens, again.external_tokens, hit.local_tokens) == (0, WHOLE, WHOLE)
    assert again.token_ids == hit.token_ids == first.token_ids and again.logprobs == hit.logprobs
    forget(engine)
    base = recalled_all(engine, question(prompt, None))[0]
    assert base.external_tokens == WHOLE and base.token_ids == plain.token_ids
    engine.close()

    with new_engine(model, folder, well, "second") as second:
        same = ("other name", 7, str(adapters[2]))
        assert second.load_adapter(same)
        found = [second.ask_all(question(prompt, same))[0]]
        eventually(
            lambda: found.append(_asked(second, prompt, same)) or found[-1].external_tokens == WHOLE, "its blocks"
        )
        assert found[-1].token_ids == first.token_ids, "by content, not by name"
    with new_engine(model, folder, well, "third") as third:
        two = ("name", 1, str(adapters[1]))
        other = served(third, well, prompt, two)
        assert other.external_tokens == 0 and other.token_ids != first.token_ids, "nor by name, with another content"
        forget(third)
        again = recalled_all(third, question(prompt, two))[0]
        assert (again.external_tokens, again.token_ids) == (WHOLE, other.token_ids)

        # Loaded in place from elsewhere: the same name and number, other content. In doubt, nothing is recalled.
        assert third.load_adapter(("name", 1, str(adapters[0])), in_place=True)
        forget(third)
        spilled = well.stats()["spilled_blocks"]
        in_place = third.ask_all(question(prompt, ("name", 1, str(adapters[0]))))[0]
        forget(third)
        assert in_place.token_ids == first.token_ids and receipt(in_place)["recalled_tokens"] == 0
        assert well.stats()["spilled_blocks"] == spilled
    eventually(well.is_idle, "nothing is held")


def _asked(engine: EngineProcess, prompt: list[int], adapter: tuple[str, int, str]) -> Answer:
    forget(engine)
    return engine.ask_all(question(prompt, adapter))[0]


def test_an_adapter_that_is_changed_under_the_engine_bypasses(
    well: Well, texts: list[list[int]], adapters: list[Path], model: Path, folder: Path
) -> None:
    prompt = texts[1][:PROMPT]
    place = folder / "adapters" / "changing"
    shutil.copytree(adapters[0], place)
    with new_engine(model, folder, well, "fourth") as engine:
        mine = ("mine", 3, str(place))
        assert engine.load_adapter(mine)
        make_adapter(folder / "adapters" / "three", model, 3)
        shutil.copy(folder / "adapters" / "three" / "adapter_model.safetensors", place / "adapter_model.safetensors")
        before = engine.ask_all(question(prompt, mine))[0]
        forget(engine)
        spilled = well.stats()["spilled_blocks"]
        again = engine.ask_all(question(prompt, mine))[0]
        forget(engine)
        assert again.token_ids == before.token_ids, "the engine has what it loaded"
        assert receipt(again)["recalled_tokens"] == 0 and well.stats()["spilled_blocks"] == spilled
        eventually(lambda: well.stats().get("engine_bypassed_adapter", 0) >= 2, "counted")
