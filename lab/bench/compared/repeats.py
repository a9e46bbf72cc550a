"""Exact repeats of a whole number of pages, and next turns of a conversation: time to first token over an engine hit.

The engine that hits holds everything; the others forget all KV before each request. A request has to compute something,
so of a prompt that ends with a page vLLM's own cache leaves that page out; a recall leaves out its last token. A turn
is what was asked before, what was answered, and something new.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from lab.bench.compared import peer_samples, systems
from lab.bench.compared.itl import forget
from lab.bench.compared.peer_samples import Kind, Sample
from lab.bench.compared.peers import AWAKE, OUTPUT, Workload, halted, sample_of
from lab.bench.compared.stand import Stand
from lab.bench.compared.systems import HOST, LIMIT
from lab.bench.report import Result, Row, Target
from stepwell.demo import documents as library
from stepwell.demo import model as models
from stepwell.demo.folder import demo_folder
from stepwell.demo.progress import Progress
from stepwell.demo.progress import progress as suitable_progress
from stepwell.demo.wire import Answer

TARGETS = {(Kind.EXACT, 128): 0.75, (Kind.TURN, 128): 1.05}
NEW = 100
"""Tokens that a turn adds to what was asked and answered."""


@dataclass(frozen=True, slots=True)
class Size:
    documents: int
    repetitions: int
    pages: Sequence[int]


FULL, QUICK = Size(8, 8, (128, 32)), Size(2, 2, (128,))


def run(quick: bool, names: Sequence[str] = (LIMIT, HOST)) -> Result:
    """As `peers.run`."""
    chosen, size, progress = systems.check(names), QUICK if quick else FULL, suitable_progress()
    model = models.prepare(None, progress)
    encode, kv_token = library.load_encoder(model), models.kv_bytes_per_token(models.read_config(model))
    assert kv_token is not None, "the default model says it"
    found: list[Row] = []
    counts = {"documents": size.documents, "repetitions": size.repetitions}
    for page in size.pages:
        documents = library.choose(encode, size.documents, page)
        grown = size.repetitions * (OUTPUT + NEW)
        work = Workload(
            model, [replace(each, prompt=each.prompt + each.prompt[:grown]) for each in documents], page, 1, kv_token
        )
        with demo_folder(models.cache_folder()) as folder:
            samples = _measured(work, [list(each.prompt) for each in documents], chosen, size, folder, progress)
        found += rows(samples, page)
        counts[f"dropped_page_{page}"] = 2 * len(chosen) * size.documents * size.repetitions - len(samples)
    remarks = [
        f"prompts of 2,000 to 2,900 tokens and, for next turns, {OUTPUT} answered and {NEW} new ones each time; one "
        "request at a time, bf16, default processes; ratios of the same repetition and document"
    ]
    return Result("repeats", found, counts, remarks)


def rows(samples: Sequence[Sample], page: int) -> list[Row]:
    found: list[Row] = []
    for kind in (Kind.EXACT, Kind.TURN):
        for name in dict.fromkeys(sample.system for sample in samples):
            chosen = [sample for sample in samples if (sample.system, sample.kind) == (name, kind)]
            share = peer_samples.hit_share(chosen)
            cached = f"{100 * share:.1f} % of the tokens in whole pages cached" if share is not None else ""
            what = f"{name}, page {page}, {kind}"
            if name != LIMIT:
                bound = TARGETS.get((kind, page)) if name == HOST else None
                target = Target("<=", bound) if bound is not None else None
                found.append(peer_samples.over(samples, name, LIMIT, kind, f"{what}: TTFT over an engine hit", target))
            found += peer_samples.spread(f"{what}: TTFT", [sample.ttft_s for sample in chosen], cached)
    return found


def _measured(
    work: Workload, prompts: Sequence[list[int]], names: Sequence[str], size: Size, folder: Path, progress: Progress
) -> list[Sample]:
    samples: list[Sample] = []
    with ExitStack() as stack:
        stands: dict[str, Stand] = {}
        talks: dict[str, list[list[int]]] = {}
        for name in names:
            with halted(stands.values()), progress.waiting(f"page {work.page}: starting {name}"):
                stand = Stand(
                    systems.system(name, folder, work.memory()), work.model, work.shape(LIMIT), folder / f"{name}.log"
                )
                stands[name] = stack.enter_context(contextlib.closing(stand))
                talks[name] = [_next_turn(prompt, stand.ask(prompt, OUTPUT), prompt[:NEW]) for prompt in prompts]
        with progress.steps(f"page {work.page}: all systems in turn", size.repetitions * len(names)) as step:
            for repetition in range(size.repetitions):
                for name in peer_samples.order(names, repetition):
                    with halted(stand for other, stand in stands.items() if other != name):
                        samples += _asked(stands[name], work, prompts, talks[name], repetition)
                    step(f"{name}, repetition {repetition + 1}")
    return samples


def _asked(
    stand: Stand, work: Workload, prompts: Sequence[list[int]], talks: list[list[int]], repetition: int
) -> list[Sample]:
    """The `talks` go on by a turn each. What was not hit where it should have been is left out."""
    samples: list[Sample] = []
    recalls = stand.system.name != LIMIT
    stand.ask(prompts[0][:AWAKE], 1)  # it was halted
    for kind in (Kind.EXACT, Kind.TURN):
        for number, prompt in enumerate(prompts):
            asked = talks[number] if kind is Kind.TURN else prompt[: len(prompt) // work.page * work.page]
            if recalls:
                forget(stand)
            answer = stand.ask(asked, OUTPUT)
            if kind is Kind.TURN:
                at = (repetition + 1) * NEW
                talks[number] = _next_turn(asked, answer, prompt[at : at + NEW])
            if answer.cached_tokens == (answer.external_tokens if recalls else answer.local_tokens):
                samples.append(sample_of(stand.system.name, work, repetition, kind, number, answer, None))
    return samples


def _next_turn(asked: Sequence[int], answer: Answer, new: Sequence[int]) -> list[int]:
    return [*asked, *answer.token_ids, *new]
