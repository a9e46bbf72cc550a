"""Real engines for benchmarks: a model, a folder, a well and vLLM in its default processes, warmed up."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from stepwell.demo import documents as library
from stepwell.demo import model as models
from stepwell.demo.documents import Encode
from stepwell.demo.engine import EngineConfig, EngineProcess
from stepwell.demo.folder import demo_folder
from stepwell.demo.progress import Progress
from stepwell.demo.progress import progress as suitable_progress
from stepwell.demo.well import DemoWell

WARM_UP_LIMIT_S = 60.0


def in_one_process(settings: EngineConfig) -> EngineConfig:
    """The same in one process: starts in a third of the time, and hides what several processes may get wrong."""
    return replace(
        settings,
        env={**settings.env, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        extra={**settings.extra, "distributed_executor_backend": "uni"},
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """`page` and `max_model_len` in tokens, `pool_pages` usable ones."""

    page: int
    pool_pages: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Bench:
    """A benchmark's place: the model's folder and tokenizer, a folder for logs, a well of its own, someone to tell."""

    model: Path
    encode: Encode
    folder: Path
    well: DemoWell
    progress: Progress

    @contextmanager
    def engine(self, name: str, shape: Shape, *, stepwell: bool = True) -> Iterator[EngineProcess]:
        """A running engine, with stepwell one that has recalled something. Raises EngineFailed, TimeoutError."""
        connector = self.well.connector() if stepwell else None
        config = EngineConfig(self.model, shape.page, shape.pool_pages, shape.max_model_len, connector)
        with self.progress.waiting(f"starting vLLM: {name}"):
            engine = EngineProcess.start(config, self.folder / f"{name}.log")
        with engine:
            if stepwell:
                warm_up(engine, shape.page)
            yield engine


@contextmanager
def bench(host_bytes: int, disk_bytes: int = 0, settings: Mapping[str, str | int] | None = None) -> Iterator[Bench]:
    """Everything that it holds is gone at the end, but the converted model. `settings`: further ones of the connector.
    Raises ConfigError as the demo does."""
    progress = suitable_progress()
    model = models.prepare(None, progress)
    with demo_folder(models.cache_folder()) as folder:
        well = DemoWell(folder / "home", host_bytes, disk_bytes, settings or {})
        try:
            yield Bench(model, library.load_encoder(model), folder, well, progress)
        finally:
            well.stop()


def warm_up(engine: EngineProcess, page: int) -> None:
    """Asks until something is recalled: until then the connector may not know the weights' fingerprint yet."""
    prompt = [100 + number % 50 for number in range(9 * page + 7)]
    deadline = time.monotonic() + WARM_UP_LIMIT_S
    while not engine.ask(prompt, 2).external_tokens:
        engine.reset_prefix_cache()
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing was recalled within {WARM_UP_LIMIT_S:.0f} s of the start")
        time.sleep(0.25)


def pages_for(lengths: Sequence[int], output: int, page: int) -> list[int]:
    """Pages that each prompt of these lengths needs, its answer included."""
    return [-(-(length + output) // page) for length in lengths]
