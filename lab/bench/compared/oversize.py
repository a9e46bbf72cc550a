"""A context that is eight times as large as host memory, recalled from disk by a real engine.

Its model has dummy weights and so many KV heads that a token has 128 KiB of KV. In each repetition an engine that holds
the context is asked about it, as many bytes are read from a bare file with O_DIRECT by as many threads as a well has,
and an engine that has forgotten it recalls it through a host tier of 64 MiB which is empty, as is the page cache.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.bench.compared import peer_samples, systems
from lab.bench.compared.itl import forget
from lab.bench.compared.peer_samples import BARE, HITS, OVER_FLOOR, Kind, Sample
from lab.bench.compared.peers import AWAKE, Workload, bare_file, halted, read_beside, sample_of
from lab.bench.compared.stand import Stand
from lab.bench.compared.systems import DISK, LIMIT, System
from lab.bench.report import Result, Row, Target
from stepwell.demo import model as models
from stepwell.demo.documents import DemoDocument
from stepwell.demo.engine import EngineFailed
from stepwell.demo.folder import demo_folder
from stepwell.demo.progress import progress as suitable_progress
from stepwell.demo.results.stats import Estimate
from stepwell.demo.well import MIB

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
"""Tokens of an engine page, which has 4 MiB, and of a step."""
_QUESTION, _OUTPUT, _FILLS = 24, 2, 5


@dataclass(frozen=True, slots=True)
class Size:
    tokens: int
    repetitions: int


FULL, QUICK = Size(4096, 24), Size(1024, 2)


def run(quick: bool) -> Result:
    """Raises as `peers.run` does."""
    size, progress = QUICK if quick else FULL, suitable_progress()
    prompt = (*(100 + 37 * at % 1009 for at in range(size.tokens)), *range(_QUESTION))
    context = DemoDocument("context", size.tokens, prompt)
    work = Workload(models.prepare(None, progress), [context], PAGE, 1, TOKEN_BYTES, HOST_BYTES)
    with (
        demo_folder(models.cache_folder()) as folder,
        progress.steps("recalls and engine hits", size.repetitions) as step,
    ):
        samples = _samples(work, size.repetitions, folder, step)
    remarks = [
        f"{size.tokens:,} tokens of {TOKEN_BYTES >> 10} KiB, engine page {PAGE}, sealed blocks of 4 MiB; dummy weights "
        f"in the shape {SHAPE}; host tier of {HOST_BYTES // MIB} MiB; one request at a time, bf16, default processes"
    ]
    return Result("oversize", rows(samples, size.tokens), {"repetitions": size.repetitions}, remarks)


def rows(samples: Sequence[Sample], tokens: int) -> list[Row]:
    shares = [sample.cached / tokens for sample in samples if sample.system == DISK]
    least = Estimate(min(shares), min(shares), min(shares), len(shares))
    what = f"{tokens * TOKEN_BYTES // MIB} MiB through {HOST_BYTES // MIB} MiB of host memory"
    found = [Row(f"{what}: blocks recalled, at least", "", least, Target(">=", HITS))]
    for other, target in ((BARE, Target("<=", OVER_FLOOR)), (LIMIT, None)):
        found.append(peer_samples.over(samples, DISK, other, Kind.ALONE, f"{what}: TTFT over {other}", target))
    for name in (DISK, LIMIT, BARE):
        found += peer_samples.spread(f"{name}: TTFT", [s.ttft_s for s in samples if s.system == name], "")
    return found


def _samples(work: Workload, repetitions: int, folder: Path, step: Callable[[str], None]) -> list[Sample]:
    samples: list[Sample] = []
    with ExitStack() as stack:
        bare = stack.enter_context(bare_file(folder, work))
        stands: dict[str, Stand] = {}
        for name in (LIMIT, DISK):
            system = _dummy(systems.system(name, folder, work.memory()))
            log = folder / f"{name}.log"
            with halted(stands.values()):
                if name == DISK:
                    with contextlib.closing(Stand(_roomy(system), work.model, work.shape(LIMIT), log)) as writer:
                        _fill(writer, work)
                stands[name] = stack.enter_context(
                    contextlib.closing(Stand(system, work.model, work.shape(LIMIT), log))
                )
                _fill(stands[name], work)
        for repetition in range(repetitions):
            for name in peer_samples.order((LIMIT, DISK), repetition):
                with halted(stand for other, stand in stands.items() if other != name):
                    samples.append(_asked(stands[name], work, repetition))
                if name == LIMIT:
                    with halted(stands.values()):
                        samples += read_beside(bare, samples[-1:], work)
            step(", ".join(f"{sample.system} {sample.ttft_s:.3f} s" for sample in samples[-3:]))
    return samples


def _dummy(system: System) -> System:
    """With the model of this benchmark, which computes so fast that recalls have to be asked for. What dummy weights
    are, a name of ours says."""
    extra = {"load_format": "dummy", "hf_overrides": SHAPE, "max_num_batched_tokens": STEP}
    connector: Any = system.connector
    if connector is not None:
        connector["kv_connector_extra_config"] |= {"weights_id": "dummy", "recall": "always"}
    return replace(system, extra=extra)


def _roomy(system: System) -> System:
    """The same with host memory for the whole context: what is computed at once has room until it is written."""
    connector: Any = copy.deepcopy(system.connector)
    connector["kv_connector_extra_config"]["host"] = "1GiB"
    return replace(system, connector=connector)


def _fill(stand: Stand, work: Workload) -> None:
    """Until all of the context is hit, or recalled. Raises EngineFailed if that does not come."""
    for _ in range(_FILLS):
        if _asked(stand, work, 0).cached == work.documents[0].tokens:
            return
    raise EngineFailed(f"after {_FILLS} answers not all of their context is there", stand.log)


def _asked(stand: Stand, work: Workload, repetition: int) -> Sample:
    """Of a system with a disk the answer comes from there, and its receipt says how much."""
    prompt = work.documents[0].prompt
    if stand.system.disk is not None:
        forget(stand)
    stand.ask(prompt[:AWAKE], 1)  # it was halted
    answer = stand.ask(prompt, _OUTPUT)
    sample = sample_of(stand.system.name, work, repetition, Kind.ALONE, 0, answer, None)
    told = answer.kv_transfer_params
    return replace(sample, cached=told["stepwell"]["recalled_tokens"]) if told else sample
