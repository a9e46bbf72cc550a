"""A real engine with vLLM's own filesystem tier, on a CPU through `benchmarks/peers`: files damaged between the storing
and the recall of their blocks, and a disk that fails, is full or hangs meanwhile."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lab.bench import storage
from lab.bench.compared import systems
from lab.bench.compared.systems import VLLM_FS, Memory
from lab.trust.budget import Budget
from lab.trust.engine.prompts import OUTPUT, Prompt, answered, draw
from lab.trust.peer.disk import HANG, hung_row
from lab.trust.report import Row
from stepwell.demo import documents as library
from stepwell.demo import model as models
from stepwell.demo.engine import EngineConfig, EngineFailed, EngineProcess
from stepwell.demo.progress import PlainProgress
from stepwell.errors import StepwellError
from stepwell.testing.fuse import FaultyDisk, Rule, why_not

PROMISE = "vLLM's fs tier in an engine: answered and equal, files damaged"
HUNG = "vLLM's fs tier in an engine: a hanging read is not waited for"
_SHAPE: dict[str, Any] = {"page": 32, "pool_pages": 20, "max_model_len": 352}
_CPU_TIER = 32 << 20
"""Far less than the prompts have, so that all but the last two or three come from files."""

_OTHERS, _LONG = 4, 300
"""Requests, and their tokens, after which nothing else is left in that."""

_Damage = Callable[[Sequence[Path], random.Random], None]
_RULES = {
    "EIO on reads": Rule(op="read", name="*.bin", errno=errno.EIO),
    "files deleted, ENOSPC on writes": Rule(op="write", errno=errno.ENOSPC),
}


@dataclass(slots=True)
class _Seen:
    """Of one kind of damage: requests that recalled, whose outputs differ, and that failed."""

    recalled: int = 0
    differ: int = 0
    failed: int = 0
    missed: int = 0


@dataclass(slots=True)
class _Found:
    """`hung_s`: by how much first tokens came later when a read hung. `why`: a faulty disk could not be had."""

    seen: dict[str, _Seen] = field(default_factory=dict)
    hung_s: list[float] = field(default_factory=list)
    why: str = ""
    evidence: list[str] = field(default_factory=list)


def rows(budget: Budget, version: str) -> list[Row]:
    try:
        systems.check([VLLM_FS])
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stepwell-peer-")))
            why, backing = why_not(), folder / "backing"
            backing.mkdir()
            faulty = None if why else stack.enter_context(FaultyDisk(backing, budget.seed))
            found = _tried(folder, faulty, budget)
            found.why = why
    except (EngineFailed, StepwellError) as error:
        why = f"{version}: not tried: {error}"
        return [Row(promise, 0, 0, budget.seed, why, comparison=True) for promise in (PROMISE, HUNG)]
    told = ", ".join(
        f"{kind}: {s.recalled} recalled, {s.missed} missed, {s.differ} answered otherwise, {s.failed} failed"
        for kind, s in found.seen.items()
    )
    cases = sum(s.recalled + s.missed for s in found.seen.values())
    wrong = sum(s.differ + s.failed for s in found.seen.values())
    remark = f"{version}, on a CPU by benchmarks/peers, float32: {told}"
    if found.why:
        remark += f"; no failing disk: {found.why}"
    return [
        Row(PROMISE, cases, wrong, budget.seed, remark, found.evidence, comparison=True),
        hung_row(HUNG, found.hung_s, budget, f"{version}, on a CPU by benchmarks/peers: a request"),
    ]


def _tried(folder: Path, faulty: FaultyDisk | None, budget: Budget) -> _Found:
    model = models.prepare(None, PlainProgress())
    documents = library.choose(library.load_encoder(model), max(4, budget.of(4, 16)), _SHAPE["page"])
    drawn = draw(documents, budget.dice("peer", "prompts"), _SHAPE["page"])
    tested = systems.system(VLLM_FS, faulty.path if faulty else folder, Memory(_CPU_TIER, _CPU_TIER))
    assert tested.disk is not None
    env = {**tested.env, "VLLM_RPC_BASE_PATH": str(folder)}
    config = EngineConfig(model, connector=tested.connector, dtype="float32", env=env, **_SHAPE)
    found = _Found()
    with EngineProcess.start(config, folder / "engine.log") as engine:
        shared = storage.shared_files(engine.pids())
        try:
            prompts = answered(engine, drawn)  # and stored
            _settle(tested.disk)
            for kind, damage in _DAMAGE.items():
                if not budget.over:
                    harm = partial(_to_files, tested.disk, damage, budget.dice("peer", kind))
                    found.seen[kind] = _pass(engine, prompts, tested.disk, kind, harm, _nobody, found)
            if faulty is not None and not budget.over:
                for kind, rule in _RULES.items():
                    harm = partial(_to_disk, faulty, tested.disk, rule)
                    found.seen[kind] = _pass(engine, prompts, tested.disk, kind, harm, faulty.heal, found)
                for prompt in prompts[: budget.of(1, 20)]:
                    found.hung_s += _hung(engine, faulty, prompt)
        finally:
            engine.close()
            storage.remove_left(shared)
    return found


def _pass(
    engine: EngineProcess,
    prompts: Sequence[Prompt],
    disk: Path,
    kind: str,
    harm: Callable[[], None],
    heal: Callable[[], None],
    found: _Found,
) -> _Seen:
    """Everything is asked again, with files or a disk that are harmed now and whole again afterwards."""
    seen, whole = _Seen(), disk.with_name("whole")
    shutil.copytree(disk, whole)
    harm()
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
    _settle(disk)
    heal()
    shutil.rmtree(disk)  # with what wrong answers have added to it
    whole.rename(disk)
    return seen


def _hung(engine: EngineProcess, faulty: FaultyDisk, prompt: Prompt) -> list[float]:
    """By how many seconds a request's first token came later than before, as one read hung; none, if none hung."""
    engine.reset_prefix_cache()
    before = engine.ask(list(prompt.tokens), 1)  # from files, as all was asked since
    for other in range(_OTHERS):  # its blocks leave the memory above the files
        engine.ask([1000 + other] * _LONG, 1)
    engine.reset_prefix_cache()
    faulty.set(HANG)
    try:
        answer = engine.ask(list(prompt.tokens), 1)
        hits = sum(faulty.report().hits)
    finally:
        faulty.heal()
    return [answer.ttft_s - before.ttft_s] if hits else []


def _settle(disk: Path) -> None:
    """Everything is written."""
    storage.wait_quiet(lambda: sum(path.stat().st_size for path in disk.rglob("*.bin")))


def _nobody() -> None:
    """Nothing to heal."""


def _to_files(disk: Path, damage: _Damage, dice: random.Random) -> None:
    damage(sorted(disk.rglob("*.bin")), dice)


def _to_disk(faulty: FaultyDisk, disk: Path, rule: Rule) -> None:
    """A disk that refuses writes has no files: all would be there already."""
    if rule.op == "write":
        for path in disk.rglob("*.bin"):
            path.unlink()
    faulty.set(rule)


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


_DAMAGE: dict[str, _Damage] = {
    "untouched": _nothing,
    "one bit in 4 KiB flipped": _flip,
    "swapped": _swap,
    "cut to half": _cut,
}
