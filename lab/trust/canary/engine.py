"""Canaries of a real vLLM: every recalled prefix is one, in batches of all shapes; then the same with other weights."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lab.bench.serving.engines import in_one_process
from lab.trust.budget import Budget
from lab.trust.report import Row, ended_by
from stepwell.client import control
from stepwell.demo import documents
from stepwell.demo import model as models
from stepwell.demo.engine import EngineConfig, EngineProcess
from stepwell.demo.progress import PlainProgress
from stepwell.demo.wire import Question
from stepwell.errors import BackendDown, StepwellError
from stepwell.hierarchy.sessions.canaries import KNOWN

PAGE, POOL = 32, 60
TEXTS, LONGEST = 6, 200
WAIT_S = 60.0
NEWS_S = 300.0
"""In which one more canary must come while engines are asked: every recall is one, and each round has some."""

CLEAN, TRIPPED = "a real vLLM's canaries raise no alarm", "a real vLLM of other weights trips it"
CHANGE, CHANGE_UNKNOWN = 0.02, 0.1
"""Noise in each weight matrix, relative to its own size, that must be noticed once the bound is known, and before."""


def run(budget: Budget) -> Iterator[Row]:
    wanted = budget.of(ci=0, full=10_000)
    if not wanted:
        yield Row(CLEAN, 0, 0, budget.seed, "at full scale only; in CI tests/e2e/test_canary.py")
        return
    if find_spec("vllm") is None:
        yield Row(CLEAN, 0, 0, budget.seed, "no vLLM is installed here")
        return
    try:
        model, texts = _material()
    except StepwellError as error:
        yield Row(CLEAN, 0, 0, budget.seed, f"not tried: {error.what}")
        return
    with tempfile.TemporaryDirectory(prefix="swc", dir="/tmp") as folder:
        base = Path(folder)
        (base / "run").mkdir(mode=0o700)
        with patch.dict(os.environ, {"XDG_RUNTIME_DIR": str(base / "run")}):
            try:
                yield from _try(budget, base, wanted, model, texts)
            finally:
                _end(base / "home")


def _material() -> tuple[Path, list[list[int]]]:
    """The model, and what it is asked. Raises StepwellError where there is none."""
    model = models.prepare(None, PlainProgress())
    chosen = documents.choose(documents.load_encoder(model), TEXTS, 128)
    return model, [list(document.prompt[:LONGEST]) for document in chosen]


def _try(budget: Budget, base: Path, wanted: int, model: Path, texts: list[list[int]]) -> Iterator[Row]:
    """What ends it early is a violation: with the model there, an engine that does not start or serve is ours."""
    dice, broken = budget.dice("canary", "engine"), []
    clean = mismatched = 0
    try:
        _clean(budget, base, wanted, model, texts, dice)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is counted, and what was counted is told
        broken.append(ended_by(error))
    try:
        clean, mismatched = _heard(base)
    except StepwellError as error:
        broken.append(ended_by(error))
    remark = "canaries of vLLM on CPU in bfloat16, mixed batches"
    yield Row(CLEAN, clean + mismatched, mismatched + len(broken), budget.seed, remark, broken)
    share, needed = CHANGE if clean >= KNOWN else CHANGE_UNKNOWN, 0
    broken = []
    try:
        needed = _tripped(base, changed(model, base / "model", share), texts, dice)
    except Exception as error:  # noqa: BLE001 - the same
        broken.append(ended_by(error))
    remark = f"an engine whose weights differ by {share:.0%}; "
    remark += f"in quarantine after {needed} canaries" if needed else "it was not in quarantine"
    yield Row(TRIPPED, 1, 0 if needed and not broken else 1, budget.seed, remark, broken)


def _clean(budget: Budget, base: Path, wanted: int, model: Path, texts: list[list[int]], dice: random.Random) -> None:
    """Asks until so many canaries were clean, or one was not. Raises TimeoutError where none comes for a long time."""
    for number, tokens in enumerate((256, 64)):  # prompts come whole, and in pieces
        if number and budget.over:
            break
        with _engine(model, base, f"clean{number}", tokens, several=not number) as engine:
            goal, most, since = wanted * (number + 1) // 2, 0, time.monotonic()
            while (heard := _heard(base))[0] < goal and not budget.over and not heard[1]:
                if heard[0] > most:
                    most, since = heard[0], time.monotonic()
                if time.monotonic() > since + NEWS_S:
                    raise TimeoutError(f"no canary in {NEWS_S:g} s, after {heard[0]}")
                _ask(engine, texts, dice)
                budget.tell(f"{heard[0]:,} of {wanted:,} canaries of a real vLLM")


def _tripped(base: Path, other: Path, texts: list[list[int]], dice: random.Random) -> int:
    """The canaries that it took until an engine of other weights was noticed; 0: it was not in time."""
    with _engine(other, base, "other", 256) as engine:
        before, until = sum(_heard(base)), time.monotonic() + WAIT_S
        while not _barred(base) and time.monotonic() < until:
            _ask(engine, texts, dice)
        return max(1, sum(_heard(base)) - before) if _barred(base) else 0


@contextmanager
def _engine(model: Path, base: Path, name: str, tokens: int, *, several: bool = False) -> Iterator[EngineProcess]:
    """Of `several` processes, as the first one is, or quick to start. A step computes so many `tokens` at most."""
    own = {"home": str(base / "home"), "host": "256MiB", "weights_id": "the same", "canary": 1, "block_tokens": PAGE}
    connector = {"kv_connector": "StepwellConnector", "kv_role": "kv_both", "kv_connector_extra_config": own}
    config = EngineConfig(model, PAGE, POOL, 512, connector, extra={"max_num_batched_tokens": tokens})
    with EngineProcess.start(config if several else in_one_process(config), base / f"{name}.log") as engine:
        until = time.monotonic() + WAIT_S
        while not _stats(base).get("sessions") and time.monotonic() < until:
            time.sleep(0.1)
        yield engine


def _ask(engine: EngineProcess, texts: list[list[int]], dice: random.Random) -> None:
    """A few requests that come at different steps, with prompts that the engine itself has just forgotten."""
    questions = []
    for _ in range(dice.choice((1, 1, 2, 4, 8))):
        prompt = dice.choice(texts)[: dice.choice((40, 70, 110, LONGEST))]
        questions.append(Question(prompt, dice.choice((1, 1, 3, 12)), after=dice.randrange(6)))
    engine.ask_all(questions)
    until = time.monotonic() + WAIT_S
    while not engine.reset_prefix_cache() and time.monotonic() < until:
        time.sleep(0.05)


def changed(model: Path, folder: Path, share: float) -> Path:
    """A copy of a model whose weight matrices have noise of so much of their own size."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    torch.manual_seed(1)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if tensor.ndim == 2:
                noise = torch.randn(tensor.shape) * tensor.float().std() * share
                tensors[name] = (tensor.float() + noise).to(tensor.dtype)
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


def _stats(base: Path) -> dict[str, Any]:
    try:
        return control.stats(base / "home", seconds=10)
    except BackendDown:
        return {}


def _heard(base: Path) -> tuple[int, int]:
    stats = _stats(base)
    return int(stats.get("canaries_clean", 0)), int(stats.get("canaries_mismatched", 0))


def _barred(base: Path) -> bool:
    return bool(_stats(base).get("quarantined_namespaces"))


def _end(home: Path) -> None:
    try:
        control.stop(home)
    except BackendDown as error:
        if error.code != "SW-505":
            raise
