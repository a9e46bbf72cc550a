"""What recalls cost those who are being served: time between the tokens of running requests beside recalls.

One engine, a few requests that run, and documents that arrive one after the other while they do, 200 MB of KV and more.
In one half of a pair these documents are recalled, all of them from the disk where there is one; in the other the
engine still holds them: everything else is the same, steps and tokens included. Which half comes first alternates.
vLLM's own counts say that one half was recalled and the other was not; unfair pairs are dropped and counted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from lab.bench.compared import systems
from lab.bench.compared.stand import Stand
from lab.bench.compared.systems import DISK, HOST, Memory
from lab.bench.report import Result, Row, Target
from lab.bench.serving import engines
from lab.bench.serving.engines import Shape
from stepwell.client import control
from stepwell.demo import documents as library
from stepwell.demo import model as models
from stepwell.demo.folder import demo_folder
from stepwell.demo.progress import progress as suitable_progress
from stepwell.demo.results import stats
from stepwell.demo.results.measure import Ratio, ratio
from stepwell.demo.well import MIB
from stepwell.demo.wire import Answer, Question

TARGET, LEAST_BYTES = 1.05, 200_000_000
PAGE = 128
RUNNING, TOKENS = 2, 32
"""Requests that run, and the tokens that each of them answers."""
FIRST_AT, EVERY = 4, 5
"""Engine steps until the first document comes, and between two of them: the last is recalled before the running end."""

_HOST = Memory(large=1024 * MIB, small=160 * MIB)  # half of it may be pinned by one request: the longest has 63 MiB
_PROMPT = 24  # of a running request: less than a page, so that nobody ever holds it
_RESET_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Size:
    documents: int
    pairs: int


FULL, QUICK = Size(5, 24), Size(5, 2)


@dataclass(frozen=True, slots=True)
class Half:
    """`itl_s` of each running request, `ttft_s` and `cached` tokens of each document; `recalled` tokens in all."""

    itl_s: tuple[float, ...]
    ttft_s: tuple[float, ...]
    cached: tuple[int, ...]
    recalled: int


@dataclass(frozen=True, slots=True)
class Pair:
    recalls: Half
    hits: Half

    @property
    def fair(self) -> bool:
        """The documents had the same tokens cached; all of them were recalled in one half, and none in the other."""
        same = self.recalls.cached == self.hits.cached
        return same and self.hits.recalled == 0 and self.recalls.recalled == sum(self.recalls.cached) > 0

    @property
    def ratio(self) -> float:
        return fmean(self.recalls.itl_s) / fmean(self.hits.itl_s)


def run(quick: bool, names: Sequence[str] = (HOST, DISK)) -> Result:
    """`names` are systems with a tier of stepwell's; others are left out. Raises as `peers.run` does."""
    size = QUICK if quick else FULL
    rows_: list[Row] = []
    counts: dict[str, int] = {}
    for name in systems.check(names):
        if name not in (HOST, DISK):
            continue
        pairs, kv_token, streams = _pairs(name, size)
        found = rows(name, pairs, kv_token)
        rows_ += found
        counts[f"pairs_{name}"] = sum(pair.fair for pair in pairs)
        counts[f"dropped_{name}"] = sum(not pair.fair for pair in pairs)
        counts[f"recalls_{name}"] = size.documents * size.pairs
        counts[f"whole_streams_{name}"], counts[f"short_streams_{name}"] = streams
    remarks = [
        f"{RUNNING} running requests of {TOKENS} tokens; {size.documents} documents of 2,000 to 2,900 tokens, one in "
        f"{EVERY} engine steps, page {PAGE}, bf16, default processes; page cache of the disk's files dropped before",
    ]
    return Result("itl", rows_, counts, remarks)


def rows(name: str, pairs: Sequence[Pair], kv_token: int) -> list[Row]:
    """`kv_token` are the bytes of one token's KV. A pair that recalled less than `LEAST_BYTES` judges nothing."""
    fair = [pair for pair in pairs if pair.fair]
    what = f"{name}: time between tokens beside recalls, over beside engine hits"
    found = ratio([pair.ratio for pair in fair])
    if found is None:
        return [Row(what, "", None, Target("<=", TARGET), "no fair pair")]
    least = min(pair.recalls.recalled for pair in fair) * kv_token
    target = Target("<=", TARGET) if least >= LEAST_BYTES else None
    return [
        Row(what, "", _estimate(found), target, f"{least / 1e6:.0f} MB recalled in each pair"),
        Row("  beside recalls", "ms", _median([value for pair in fair for value in pair.recalls.itl_s])),
        Row("  beside engine hits", "ms", _median([value for pair in fair for value in pair.hits.itl_s])),
        Row(
            "  TTFT of the recalled documents", "ms", _median([value for pair in fair for value in pair.recalls.ttft_s])
        ),
        Row("  TTFT of the engine hits", "ms", _median([value for pair in fair for value in pair.hits.ttft_s])),
    ]


def _estimate(found: Ratio) -> stats.Estimate:
    return stats.Estimate(found.median, found.low, found.high, found.count)


def _median(seconds: Sequence[float]) -> stats.Estimate:
    return stats.median(seconds).times(1e3)


def _pairs(name: str, size: Size) -> tuple[list[Pair], int, tuple[int, int]]:
    """The pairs, the bytes of a token's KV, and how many of their recalls were streamed, whole and short."""
    progress = suitable_progress()
    model = models.prepare(None, progress)
    kv_token = models.kv_bytes_per_token(models.read_config(model))
    assert kv_token is not None, "the default model says it"
    chosen = library.choose(library.load_encoder(model), size.documents, PAGE)
    prompts = [list(document.prompt) for document in chosen]
    longest = max(len(prompt) for prompt in prompts)
    pages = engines.pages_for([len(prompt) for prompt in prompts], 1, PAGE)
    shape = Shape(PAGE, sum(pages) + (RUNNING + 1) * max(pages), -(-longest // PAGE) * PAGE + PAGE)
    with demo_folder(models.cache_folder()) as folder:
        system = systems.system(name, folder, _HOST)
        with progress.waiting(f"starting {name}"):
            stand = Stand(system, model, shape, folder / f"{name}.log")
        with (
            contextlib.closing(stand),
            progress.steps(f"{name}: recalls and engine hits beside running requests", size.pairs + 1) as step,
        ):
            _half(stand, prompts)  # everything is computed
            stand.settle()
            forget(stand)
            _half(stand, prompts)  # the first recall of all
            step("computed and recalled")
            before = stand.streams()
            pairs = _asked(stand, prompts, size.pairs, step)
            whole, short = (now - then for now, then in zip(stand.streams(), before, strict=True))
            return pairs, kv_token, (whole, short)


def _asked(stand: Stand, prompts: Sequence[list[int]], count: int, step: Callable[[str], None]) -> list[Pair]:
    pairs = []
    for number in range(count):
        if number % 2:
            hits = _half(stand, prompts)
            forget(stand)
            recalls = _half(stand, prompts)
        else:
            forget(stand)
            recalls = _half(stand, prompts)
            hits = _half(stand, prompts)
        pairs.append(Pair(recalls, hits))
        step(f"ratio {pairs[-1].ratio:.3f}")
    return pairs


def forget(stand: Stand) -> None:
    """The engine forgets all KV; a well with a disk all that is in host memory, and the page cache of its files. Raises
    TimeoutError."""
    deadline = time.monotonic() + _RESET_LIMIT_S
    while not stand.engine.reset_prefix_cache():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the engine did not forget its KV within {_RESET_LIMIT_S:.0f} s")
        stand.ask([1], 1)
    stand.settle()
    if stand.system.home is not None and stand.system.disk is not None:
        control.clear(stand.system.home, ["host"])
    stand.forget_page_cache()


def _half(stand: Stand, prompts: Sequence[list[int]]) -> Half:
    running = [Question([200 + number] * _PROMPT, TOKENS) for number in range(RUNNING)]
    arriving = [Question(prompt, 1, after=FIRST_AT + EVERY * at) for at, prompt in enumerate(prompts)]
    before = _recalled(stand)
    answers = stand.engine.ask_all([*running, *arriving])
    served, arrived = answers[:RUNNING], answers[RUNNING:]
    return Half(
        tuple(_itl(answer) for answer in served),
        tuple(answer.ttft_s for answer in arrived),
        tuple(answer.cached_tokens for answer in arrived),
        _recalled(stand) - before,
    )


def _itl(answer: Answer) -> float:
    return (answer.total_s - answer.ttft_s) / (len(answer.token_ids) - 1)


def _recalled(stand: Stand) -> int:
    """Tokens that vLLM has had from the connector since the engine started."""
    return int(stand.engine.metrics().get("vllm:external_prefix_cache_hits", 0))
