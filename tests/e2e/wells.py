"""A well under test, and the looking and waiting that end-to-end tests do. Waits have generous limits and end early."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.bench.serving.engines import in_one_process as in_one_process
from lab.rig import left
from stepwell.client import control
from stepwell.demo.engine import EngineConfig, EngineProcess
from stepwell.demo.wire import Answer, Question
from stepwell.errors import BackendDown

PATIENCE_S = 120.0  # until a test gives up on what must happen; never waited for in full

RECALL_ATTEMPTS = 5
_LARGEST_BLOCK = 128  # tokens, in these tests


def eventually(holds: Callable[[], bool], what: str, seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.1)


@dataclass(frozen=True, slots=True)
class Well:
    """The well of `home`, started by whichever engine comes first."""

    home: Path

    def connector(self, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
        """vLLM's KVTransferConfig as a user writes it: by name, found by the entry point."""
        return {
            "kv_connector": "StepwellConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"home": str(self.home), "host": "256MiB", "receipts": True, **extra},
        }

    def stats(self) -> dict[str, Any]:
        return control.stats(self.home, seconds=10)

    def pid(self) -> int:
        return int(self.stats()["pid"])

    def is_idle(self) -> bool:
        """Nothing is held for anybody."""
        s = self.stats()
        return not any(s[key] for key in ("pinned_bytes", "leased_blocks", "filling", "quarantined_slots"))

    def is_alone(self) -> bool:
        """No engine is connected and none has left anything behind."""
        return self.is_idle() and not self.stats()["sessions"] and not self.stats()["quarantined_sessions"]

    def stop(self) -> None:
        try:
            control.stop(self.home)
        except BackendDown as error:
            if error.code != "SW-505":
                raise

    def processes(self) -> list[int]:
        """Living processes that name this home on their command line."""
        return left.processes(self.home)


def config(model: Path, connector: dict[str, Any] | None, **changes: Any) -> EngineConfig:
    """An engine whose pool holds about one request of these tests."""
    shape: dict[str, Any] = {"page": 128, "pool_pages": 8, "max_model_len": 1024} | changes
    return EngineConfig(model=model, connector=connector, **shape)


def start(settings: EngineConfig, folder: Path, name: str) -> EngineProcess:
    began = time.monotonic()
    engine = EngineProcess.start(settings, folder / f"{name}.log")
    print(f"{name}: vLLM {engine.version} up after {time.monotonic() - began:.1f} s")
    return engine


def warm_up(engine: EngineProcess, page: int) -> None:
    """Until a small prompt is recalled: the connector knows the weights, the well is there and has room."""
    prompt = [100 + i % 50 for i in range(3 * max(page, 128) + 7)]

    def recalled() -> bool:
        answer = engine.ask(prompt, 2)
        forget(engine)
        return bool(answer.external_tokens)

    eventually(recalled, "anything is recalled")


def forget(engine: EngineProcess, *, connector: bool = False) -> None:
    """The engine's own cache is empty afterwards. It declines while a request runs or is being aborted."""
    eventually(lambda: engine.reset_prefix_cache(connector=connector), "the engine's cache is reset")


def recalled(engine: EngineProcess, prompt: list[int], tokens: int = 32, **sampling: Any) -> Answer:
    """The answer to a question whose prefix is in the well."""
    return recalled_all(engine, [Question(prompt, tokens, sampling=sampling)])[0]


def recalled_all(engine: EngineProcess, questions: list[Question]) -> list[Answer]:
    """An engine does not wait for a well that cannot keep its limits, as on a machine that is far too busy: then it is
    asked again, until all blocks of all prompts are recalled."""
    whole = [(len(question.prompt) - 1) // _LARGEST_BLOCK * _LARGEST_BLOCK for question in questions]
    for _ in range(RECALL_ATTEMPTS):
        answers = engine.ask_all(questions)
        if all(receipt(answer)["recalled_tokens"] >= tokens for answer, tokens in zip(answers, whole, strict=True)):
            return answers
        print(f"not recalled in time: {[receipt(answer) for answer in answers]}")
        forget(engine)
    raise AssertionError(f"not recalled in {RECALL_ATTEMPTS} attempts")


def receipt(answer: Answer) -> dict[str, Any]:
    assert answer.kv_transfer_params is not None
    found: dict[str, Any] = answer.kv_transfer_params["stepwell"]
    return found
