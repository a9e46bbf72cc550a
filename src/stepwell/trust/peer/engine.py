"""A real engine with vLLM's own filesystem tier, on a CPU through `benchmarks/peers`, and files damaged between the
storing and the recall of their blocks."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepwell.bench import storage, systems
from stepwell.bench.systems import VLLM_FS, Memory
from stepwell.demo import documents as library
from stepwell.demo import model as models
from stepwell.demo.engine import Engine, EngineConfig, EngineFailed
from stepwell.demo.progress import PlainProgress
from stepwell.errors import StepwellError
from stepwell.trust.budget import Budget
from stepwell.trust.engine.prompts import OUTPUT, Prompt, answered, draw
from stepwell.trust.report import Row

PROMISE = "vLLM's fs tier in an engine: answered and equal, files damaged"
_SHAPE: dict[str, Any] = {"page": 32, "pool_pages": 20, "max_model_len": 352}
_CPU_TIER = 32 << 20
"""Far less than the prompts have, so that all but the last two or three come from files."""


@dataclass(slots=True)
class _Seen:
    """Of one kind of damage: requests that recalled, whose outputs differ, and that failed."""

    recalled: int = 0
    differ: int = 0
    failed: int = 0
    missed: int = 0


@dataclass(slots=True)
class _Found:
    seen: dict[str, _Seen] = field(default_factory=dict)
    evidence: list[str] = field(default_factory=list)


def rows(budget: Budget, version: str) -> list[Row]:
    try:
        systems.check([VLLM_FS])
        with tempfile.TemporaryDirectory(prefix="stepwell-peer-") as folder:
            found = _tried(Path(folder), budget)
    except (EngineFailed, StepwellError) as error:
        return [Row(PROMISE, 0, 0, budget.seed, f"{version}: not tried: {error}", comparison=True)]
    told = ", ".join(
        f"{kind}: {s.recalled} recalled, {s.missed} missed, {s.differ} answered otherwise, {s.failed} failed"
        for kind, s in found.seen.items()
    )
    cases = sum(s.recalled + s.missed for s in found.seen.values())
    wrong = sum(s.differ + s.failed for s in found.seen.values())
    remark = f"{version}, on a CPU by benchmarks/peers, float32: {told}"
    return [Row(PROMISE, cases, wrong, budget.seed, remark, found.evidence, comparison=True)]


def _tried(folder: Path, budget: Budget) -> _Found:
    model = models.prepare(None, PlainProgress())
    documents = library.choose(library.load_encoder(model), max(4, budget.of(4, 16)), _SHAPE["page"])
    drawn = draw(documents, budget.dice("peer", "prompts"), _SHAPE["page"])
    tested = systems.system(VLLM_FS, folder, Memory(_CPU_TIER, _CPU_TIER))
    assert tested.disk is not None
    env = {**tested.env, "VLLM_RPC_BASE_PATH": str(folder)}
    config = EngineConfig(model, connector=tested.connector, dtype="float32", env=env, **_SHAPE)
    found = _Found()
    with Engine.start(config, folder / "engine.log") as engine:
        shared = storage.shared_files(engine.pids())
        try:
            prompts = answered(engine, drawn)  # and stored
            _settle(engine)
            for kind, damage in _DAMAGE.items():
                if not budget.over:
                    found.seen[kind] = _pass(
                        engine, prompts, tested.disk, kind, damage, budget.dice("peer", kind), found
                    )
        finally:
            engine.close()
            storage.remove_left(shared)
    return found


def _pass(
    engine: Engine,
    prompts: Sequence[Prompt],
    disk: Path,
    kind: str,
    damage: Callable[[Sequence[Path], random.Random], None],
    dice: random.Random,
    found: _Found,
) -> _Seen:
    """Everything is asked again, with files that are damaged now and whole again afterwards."""
    seen, whole = _Seen(), disk.with_name("whole")
    shutil.copytree(disk, whole)
    damage(sorted(disk.rglob("*.bin")), dice)
    for prompt in prompts:
        engine.reset_prefix_cache()
        try:
            answer = engine.ask(list(prompt.tokens), OUTPUT, logprobs=0)
        except EngineFailed as error:
            seen.failed += 1
            found.evidence.append(f"{kind}: {error.what}")
            break
        if answer.external_tokens:
            seen.recalled += 1
        else:
            seen.missed += 1
        if wrong := prompt.wrong(answer, OUTPUT):
            seen.differ += 1
            if seen.differ == 1:
                found.evidence.append(f"{kind}: {wrong}")
    _settle(engine)
    shutil.rmtree(disk)  # with what wrong answers have added to it
    whole.rename(disk)
    return seen


def _settle(engine: Engine) -> None:
    """Everything is written."""
    pids = engine.pids()
    storage.wait_quiet(lambda: storage.moved(pids).written)


def _nothing(files: Sequence[Path], dice: random.Random) -> None:
    """The control."""


def _flip(files: Sequence[Path], dice: random.Random) -> None:
    """One bit in each 4 KiB."""
    for path in files:
        content = bytearray(path.read_bytes())
        for at in range(0, len(content), 4096):
            content[at + dice.randrange(4096)] ^= 1 << dice.randrange(8)
        path.write_bytes(content)


def _cut(files: Sequence[Path], dice: random.Random) -> None:
    for path in files:
        os.truncate(path, path.stat().st_size // 2)


def _swap(files: Sequence[Path], dice: random.Random) -> None:
    """Each has another one's bytes."""
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)


_DAMAGE: dict[str, Callable[[Sequence[Path], random.Random], None]] = {
    "untouched": _nothing,
    "one bit in 4 KiB flipped": _flip,
    "swapped": _swap,
    "cut to half": _cut,
}
