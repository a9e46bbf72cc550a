"""Time to first token beside vLLM's own tiers and beside the limit, in one run.

The demo's workload: documents of 2,000 to 2,900 tokens, each asked about in turn, an engine's pool that holds about a
third of them, so that every question is a recall; the limit is an engine whose pool holds them all, so that every
question is an engine hit. All systems' engines live side by side, and all but the one that is asked are halted
(SIGSTOP): in each repetition each is asked about all documents, one at a time and several at a time, in rotated order.
Before every pass the page cache of a system's files is dropped. After the limit's pass as many bytes as its hits had
are read from a bare file, with O_DIRECT and by as many threads as a well has. At the end engines and wells of the
systems with a disk are killed and started again, with nothing left but their files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from lab.bench import processes, storage
from lab.bench.compared import peer_samples, systems
from lab.bench.compared.peer_samples import Kind, Read, Sample
from lab.bench.compared.stand import Stand
from lab.bench.compared.systems import SYSTEMS, Memory
from lab.bench.disk.lane import REQUEST, Bare
from lab.bench.report import Result, Row
from lab.bench.serving import engines
from lab.bench.serving.engines import Shape
from stepwell.demo import documents as library
from stepwell.demo import model as models
from stepwell.demo.documents import DemoDocument
from stepwell.demo.folder import demo_folder
from stepwell.demo.progress import Progress
from stepwell.demo.progress import progress as suitable_progress
from stepwell.demo.well import MIB
from stepwell.demo.wire import Answer, Question

OUTPUT = 16
AWAKE = 16
"""Tokens: less than a page, so that nothing is recalled."""


@dataclass(frozen=True, slots=True)
class Size:
    """`together` requests at a time beside one at a time; 1: none. `small`: bytes of host memory in front of a disk, 0
    for as much as the requests have that come together."""

    documents: int
    repetitions: int
    together: int
    pages: Sequence[int]
    small: int = 0


FULL, QUICK = Size(12, 5, 4, (128, 32)), Size(6, 2, 2, (128,))


@dataclass(frozen=True, slots=True)
class Workload:
    """What all systems get. `kv_token` are the bytes of a token's KV, `small` as in `Size`."""

    model: Path
    documents: Sequence[DemoDocument]
    page: int
    together: int
    kv_token: int
    small: int = 0

    def shape(self, name: str) -> Shape:
        """The limit's pool holds everything; the others' a quarter, or as many requests as come together."""
        pages = engines.pages_for([len(document.prompt) for document in self.documents], OUTPUT, self.page)
        everything = sum(pages) + max(pages)
        small = max(sum(pages) // 4, self.together * max(pages) + 1)
        return Shape(self.page, everything if name == systems.LIMIT else small, max(pages) * self.page)

    def memory(self) -> Memory:
        """Large: half as much again as all the KV there is, so that nobody has to evict. Small: as much as the requests
        have that come together, if nothing else is said; with less, vLLM's tiering recomputes most of them."""
        lengths = [len(document.prompt) + OUTPUT for document in self.documents]
        return Memory(
            _whole(3 * sum(lengths) * self.kv_token // 2),
            self.small or _whole(self.together * max(lengths) * self.kv_token),
            self.page,
        )


def _whole(size: int) -> int:
    """Up to the next MiB."""
    return -(-size // MIB) * MIB


def run(quick: bool, names: Sequence[str] = SYSTEMS) -> Result:
    """`names` are the systems to compare. Raises ConfigError, EngineFailed, TimeoutError, with nothing left running."""
    return measured("peers", QUICK if quick else FULL, names)


def measured(title: str, size: Size, names: Sequence[str]) -> Result:
    """As `run`."""
    chosen = systems.check(names)
    progress = suitable_progress()
    model = models.prepare(None, progress)
    encode, kv_token = library.load_encoder(model), models.kv_bytes_per_token(models.read_config(model))
    assert kv_token is not None, "the default model says it"
    rows: list[Row] = []
    counts = {"documents": size.documents, "repetitions": size.repetitions, "together": size.together}
    for page in size.pages:
        documents = library.choose(encode, size.documents, page)
        work = Workload(model, documents, page, size.together, kv_token, size.small)
        with demo_folder(models.cache_folder()) as folder:
            samples, reads, counted = _measured(work, chosen, size.repetitions, folder, progress)
        rows += peer_samples.rows(samples, reads, page)
        counts |= {f"{what}_page_{page}": count for what, count in counted.items()}
    return Result(title, rows, counts, _remarks(work, chosen))


def _remarks(work: Workload, names: Sequence[str]) -> list[str]:
    memory, shape = work.memory(), work.shape("")
    held = 100 * shape.pool_pages * work.page / sum(len(document.prompt) for document in work.documents)
    remarks = [
        f"{len(work.documents)} documents of 2,000 to 2,900 tokens and a question, bf16, {OUTPUT} tokens answered, "
        f"pool for {held:.0f} % of them; the limit's pool holds all. Ratios of the same repetition and document.",
        f"host memory: {memory.large // MIB} MiB where everything is kept there, {memory.small // MIB} MiB in front of "
        "a disk; page cache of the disks' files dropped before every pass (fdatasync, posix_fadvise DONTNEED); no "
        "canaries.",
        "CPU seconds of all processes of engine and well, those that spin while they wait for others included.",
    ]
    if systems.TIER in names:
        remarks.append(f"{systems.TIER} has {systems.WINDOW // MIB} MiB more than {systems.VLLM_FS}: its arena.")
    if set(names) & {systems.VLLM_CPU, systems.VLLM_FS}:
        remarks.append(
            "vLLM's tiers run here with a memcpy in place of their GPU copy (benchmarks/peers): their times say "
            "nothing about a GPU, ratios say what the path costs beside the copy."
        )
    return remarks


def _measured(
    work: Workload, names: Sequence[str], repetitions: int, folder: Path, progress: Progress
) -> tuple[list[Sample], list[Read], dict[str, int]]:
    """All samples of one page size, what was read from the device, and, by system, how many streams fell short and what
    killed engines left in shared memory."""
    samples: list[Sample] = []
    reads: list[Read] = []
    with ExitStack() as stack:
        stands: dict[str, Stand] = {}
        for name in names:
            system = systems.system(name, folder, work.memory())
            with halted(stands.values()), progress.waiting(f"page {work.page}: starting {name}"):
                stand = Stand(system, work.model, work.shape(name), folder / f"{name}.log")
                stands[name] = stack.enter_context(contextlib.closing(stand))
                _fill(stand, work)
        bare = stack.enter_context(bare_file(folder, work))
        with progress.steps(f"page {work.page}: all systems in turn", repetitions * len(names)) as step:
            for repetition in range(repetitions):
                for name in peer_samples.order(names, repetition):
                    with halted(stand for other, stand in stands.items() if other != name):
                        some, read = _asked(stands[name], work, repetition)
                    if name == systems.LIMIT:
                        with halted(stands.values()):
                            some += read_beside(bare, some, work)
                    samples += some
                    reads += read
                    step(f"{name}, repetition {repetition + 1}")
        counts: dict[str, int] = {}
        for name in names:
            if name in systems.ON_DISK:
                if name == systems.DISK:
                    counts[f"whole_streams_{name}"], counts[f"short_streams_{name}"] = stands[name].streams()
                with (
                    halted(stand for other, stand in stands.items() if other != name),
                    progress.waiting(f"page {work.page}: {name}, a restart of everything"),
                ):
                    samples += _restarted(stands[name], work, repetitions)
                counts[f"shared_memory_left_mib_{name}"] = stands[name].shared_memory_left // MIB
    return samples, reads, counts


@contextmanager
def halted(stands: Iterable[Stand]) -> Iterator[None]:
    with processes.halted([pid for stand in stands for pid in stand.pids()]):
        yield


def _fill(stand: Stand, work: Workload) -> None:
    """Everything is computed, and once recalled by the batch: first times are not in the figures."""
    for document in work.documents:
        stand.ask(document.prompt, OUTPUT)
    stand.settle()
    together(stand, work)
    stand.settle()


def _asked(stand: Stand, work: Workload, repetition: int) -> tuple[list[Sample], list[Read]]:
    samples: list[Sample] = []

    def keep(kind: Kind, document: int, answer: Answer, cpu_s: float | None = None) -> None:
        samples.append(sample_of(stand.system.name, work, repetition, kind, document, answer, cpu_s))

    stand.ask(work.documents[0].prompt[:AWAKE], 1)  # it was halted, or did not know that it would be asked
    stand.forget_page_cache()
    pids = stand.pids()
    before = storage.moved(pids)
    for number, document in enumerate(work.documents):
        keep(Kind.ALONE, number, stand.ask(document.prompt, OUTPUT))
    read = storage.moved(pids).read - before.read
    kv = sum(sample.cached for sample in samples) * work.kv_token
    stand.forget_page_cache()
    for number, document in enumerate(work.documents):
        answer, cpu_s = stand.ask_for_first(document.prompt)
        keep(Kind.FIRST, number, answer, cpu_s)
    if work.together > 1:
        stand.forget_page_cache()
        for number, answer in enumerate(together(stand, work)):
            keep(Kind.TOGETHER, number, answer)
    stand.settle()
    return samples, [Read(stand.system.name, work.page, read, kv)]


@contextmanager
def bare_file(folder: Path, work: Workload) -> Iterator[Bare]:
    """A file as large as the KV of the longest document."""
    (folder / "bare").mkdir()
    most = max(len(document.prompt) for document in work.documents) // work.page * work.page
    with contextlib.closing(Bare(folder / "bare", "bare", most * work.kv_token)) as bare:
        bare.create()
        bare.move(REQUEST, write=True)
        yield bare


def read_beside(bare: Bare, samples: Sequence[Sample], work: Workload) -> list[Sample]:
    """What the limit's answers one at a time would have taken if a bare read had come before each."""
    return [
        replace(sample, system=peer_samples.BARE, ttft_s=sample.ttft_s + bare.read_s(sample.cached * work.kv_token))
        for sample in samples
        if sample.kind is Kind.ALONE
    ]


def together(stand: Stand, work: Workload) -> list[Answer]:
    answers: list[Answer] = []
    for at in range(0, len(work.documents), work.together):
        batch = work.documents[at : at + work.together]
        answers += stand.engine.ask_all([Question(list(document.prompt), OUTPUT) for document in batch])
    return answers


def _restarted(stand: Stand, work: Workload, repetition: int) -> list[Sample]:
    stand.settle()
    stand.kill_everything()
    stand.forget_page_cache()
    stand.start_again()
    stand.forget_page_cache()
    return [
        sample_of(stand.system.name, work, repetition, Kind.RESTARTED, number, stand.ask(document.prompt, OUTPUT), None)
        for number, document in enumerate(work.documents)
    ]


def sample_of(
    name: str, work: Workload, repetition: int, kind: Kind, document: int, answer: Answer, cpu_s: float | None
) -> Sample:
    tokens, told = len(answer.token_ids), (answer.kv_transfer_params or {}).get("stepwell")
    return Sample(
        system=name,
        page=work.page,
        repetition=repetition,
        kind=kind,
        document=document,
        ttft_s=answer.ttft_s,
        cacheable=answer.prompt_tokens // work.page * work.page,
        cached=answer.cached_tokens,
        answer=tuple(answer.token_ids),
        itl_s=(answer.total_s - answer.ttft_s) / (tokens - 1) if tokens > 1 else None,
        cpu_s=cpu_s,
        copy_s=told["copy_ms"] / 1e3 if told else None,
    )
