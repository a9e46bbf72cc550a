"""A context that is eight times as large as host memory, recalled from disk by a real engine.

Its model has dummy weights and so many KV heads that a token has 128 KiB of KV. In each repetition an engine that holds
the context is asked about it, as many bytes are read from a bare file with O_DIRECT by as many threads as a well has,
and an engine that has forgotten it recalls it through a host tier of 64 MiB which is empty, as is the page cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.bench.compared import systems
from lab.bench.compared.itl import forget
from lab.bench.compared.peer_samples import HITS, OVER_FLOOR, order
from lab.bench.compared.peers import AWAKE, halted
from lab.bench.compared.stand import Stand
from lab.bench.compared.systems import DISK, LIMIT, Memory, System
from lab.bench.disk.lane import REQUEST, Bare
from lab.bench.report import Result, Row, Target
from lab.bench.serving.engines import Shape
from stepwell.demo import model as models
from stepwell.demo.engine import EngineFailed
from stepwell.demo.folder import demo_folder
from stepwell.demo.progress import progress as suitable_progress
from stepwell.demo.results import stats
from stepwell.demo.results.stats import Estimate
from stepwell.demo.well import MIB
from stepwell.demo.wire import Answer

HOST_BYTES, TOKEN_BYTES = 64 * MIB, 128 << 10
SHAPE = {
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_size": 256,
    "intermediate_size": 256,
}
PAGE, STEP = 32, 128
"""Tokens of an engine page, which has 4 MiB, and of a step, for whose spill host memory has room."""
_QUESTION, _OUTPUT, _FILLS = 24, 2, 5


@dataclass(frozen=True, slots=True)
class Size:
    tokens: int
    repetitions: int


FULL, QUICK = Size(4096, 24), Size(1024, 2)


@dataclass(frozen=True, slots=True)
class Turn:
    """Of one repetition. `cached` tokens of the recall's context, by its receipt."""

    hit_s: float
    bare_s: float
    recall_s: float
    cached: int


def run(quick: bool) -> Result:
    """Raises as `peers.run` does."""
    size, progress = QUICK if quick else FULL, suitable_progress()
    model = models.prepare(None, progress)
    with (
        demo_folder(models.cache_folder()) as folder,
        progress.steps("recalls and engine hits", size.repetitions) as step,
    ):
        turns = _turns(model, size, folder, step)
    remarks = [
        f"{size.tokens:,} tokens of {TOKEN_BYTES >> 10} KiB, engine page {PAGE}, sealed blocks of 4 MiB; dummy weights "
        f"in the shape {SHAPE}; host tier of {HOST_BYTES // MIB} MiB; one request at a time, bf16, default processes"
    ]
    return Result("oversize", rows(turns, size.tokens), {"repetitions": len(turns)}, remarks)


def rows(turns: Sequence[Turn], tokens: int) -> list[Row]:
    least = min(turn.cached for turn in turns) / tokens
    what = f"{tokens * TOKEN_BYTES // MIB} MiB through {HOST_BYTES // MIB} MiB of host memory"

    def ratio(floor: Callable[[Turn], float]) -> Estimate:
        return stats.median([turn.recall_s / floor(turn) for turn in turns])

    def ms(seconds: Callable[[Turn], float]) -> Estimate:
        return stats.median([seconds(turn) for turn in turns]).times(1e3)

    return [
        Row(f"{what}: blocks recalled, at least", "", Estimate(least, least, least, len(turns)), Target(">=", HITS)),
        Row(
            f"{what}: TTFT over an engine hit and a bare read",
            "",
            ratio(lambda turn: turn.hit_s + turn.bare_s),
            Target("<=", OVER_FLOOR),
        ),
        Row("  over an engine hit", "", ratio(lambda turn: turn.hit_s)),
        Row("  TTFT", "ms", ms(lambda turn: turn.recall_s)),
        Row("  TTFT of an engine hit", "ms", ms(lambda turn: turn.hit_s)),
        Row("  bare read", "ms", ms(lambda turn: turn.bare_s)),
    ]


def _turns(model: Path, size: Size, folder: Path, step: Callable[[str], None]) -> list[Turn]:
    context = [100 + 37 * at % 1009 for at in range(size.tokens)]
    prompt = [*context, *range(_QUESTION)]
    shape = Shape(PAGE, 2 * (size.tokens // PAGE), size.tokens + 2 * PAGE)
    (folder / "bare").mkdir()
    with ExitStack() as stack:
        bare = stack.enter_context(contextlib.closing(Bare(folder / "bare", "bare", size.tokens * TOKEN_BYTES)))
        bare.create()
        bare.move(REQUEST, write=True)
        stands: dict[str, Stand] = {}
        for name in (LIMIT, DISK):
            with halted(stands.values()):
                stand = Stand(
                    _dummy(systems.system(name, folder, Memory(0, HOST_BYTES))), model, shape, folder / f"{name}.log"
                )
                stands[name] = stack.enter_context(contextlib.closing(stand))
                stand.ask(prompt, _OUTPUT)
        _fill(stands[DISK], prompt, size.tokens)
        turns = []
        for repetition in range(size.repetitions):
            answers: dict[str, Answer] = {}
            for name in order((LIMIT, DISK), repetition):
                with halted(stand for other, stand in stands.items() if other != name):
                    answers[name] = _asked(stands[name], prompt)
            assert answers[LIMIT].cached_tokens == size.tokens, "its pool holds the context"
            with halted(stands.values()):
                bare_s = bare.read_s(size.tokens * TOKEN_BYTES)
            turns.append(Turn(answers[LIMIT].ttft_s, bare_s, answers[DISK].ttft_s, _recalled(answers[DISK])))
            step(f"recalled in {turns[-1].recall_s:.3f} s, hit and bare read {turns[-1].hit_s + bare_s:.3f} s")
    return turns


def _dummy(system: System) -> System:
    """With the model of this benchmark. What dummy weights are, a name of ours says."""
    extra = {"load_format": "dummy", "hf_overrides": SHAPE, "max_num_batched_tokens": STEP}
    connector: Any = system.connector
    if connector is not None:
        connector["kv_connector_extra_config"]["weights_id"] = "dummy"
    return replace(system, extra=extra)


def _fill(stand: Stand, prompt: list[int], tokens: int) -> None:
    """Until all of the context is on disk. Raises EngineFailed if that does not come."""
    for _ in range(_FILLS):
        if _recalled(_asked(stand, prompt)) == tokens:
            return
    raise EngineFailed(f"after {_FILLS} answers not all of their context is recalled", stand.log)


def _asked(stand: Stand, prompt: list[int]) -> Answer:
    """Of a system with a disk the answer comes from there."""
    if stand.system.disk is not None:
        forget(stand)
    stand.ask(prompt[:AWAKE], 1)  # it was halted
    return stand.ask(prompt, _OUTPUT)


def _recalled(answer: Answer) -> int:
    assert answer.kv_transfer_params is not None
    return int(answer.kv_transfer_params["stepwell"]["recalled_tokens"])
