"""A model of five windows to one layer that keeps all, beside one whose layers all keep all: bytes that are stored, and
time to first token of a recall over an engine hit of as many tokens.

Both are of the same size, tiny, with random weights. Their engines run beside each other and are asked in turn.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab.bench.report import Result, Row, Target
from lab.rig.tiny import KINDS, VOCABULARY, write_model
from stepwell.demo import model as models
from stepwell.demo.engine import EngineConfig, EngineProcess
from stepwell.demo.folder import demo_folder
from stepwell.demo.results import stats
from stepwell.demo.well import DemoWell
from stepwell.demo.wire import Answer, Question

WINDOW, PAGE, LAYERS, ATTEMPTS = 512, 128, 6, 5
TOKEN_BYTES = 2 * 2 * 32 * 4  # of one layer: K and V of two heads, in float32
SIZES = {"windows": ["sliding_attention"] * 5 + ["full_attention"], "full": ["full_attention"] * LAYERS}
MOST_BYTES, MOST_RATIO = 1.2, 1.1
SAMPLING = {"extra_args": {"kv_transfer_params": {"stepwell": {"recall": "always"}}}}


@dataclass(frozen=True, slots=True)
class System:
    layers: int
    """That keep all of a prompt."""
    engine: EngineProcess
    well: DemoWell

    def ask(self, prompt: list[int]) -> Answer:
        return self.engine.ask_all([Question(prompt, 1, sampling=SAMPLING)])[0]

    def pair(self, prompt: list[int]) -> tuple[Answer, Answer]:
        """A recall, and a hit of the same tokens. Raises TimeoutError where nothing is recalled."""
        for attempt in range(ATTEMPTS):
            time.sleep(attempt)  # a well that is too busy is not waited for, nor one that has yet to start
            self.engine.reset_prefix_cache()
            recall = self.ask(prompt)
            if recall.external_tokens:
                return recall, self.ask(prompt)
        raise TimeoutError(f"nothing was recalled in {ATTEMPTS} attempts")


def run(quick: bool) -> Result:
    lengths, pairs = ((2048,), 2) if quick else ((8192, 32768), 15)
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = stack.enter_context(demo_folder(models.cache_folder()))
        systems = {name: stack.enter_context(_system(name, folder, max(lengths))) for name in SIZES}
        for length in lengths:
            prompt = [random.Random(length + at).randrange(3, VOCABULARY) for at in range(length)]
            for name, system in systems.items():
                rows.append(_stored(name, system, prompt))
            taken: dict[str, list[tuple[Answer, Answer]]] = {name: [] for name in SIZES}
            for _ in range(pairs):
                for name, system in systems.items():
                    taken[name].append(system.pair(prompt))
            rows += _times(length, taken)
    remarks = [
        f"{LAYERS} layers, hidden size 128, two KV heads of 32, float32, windows of {WINDOW} tokens, pages and blocks "
        f"of {PAGE}, one request at a time, default processes"
    ]
    return Result("windows", rows, {"pairs": pairs}, remarks)


@contextmanager
def _system(name: str, folder: Path, length: int) -> Iterator[System]:
    kinds = SIZES[name]
    changes = {"layer_types": kinds, "sliding_window": WINDOW, "max_position_embeddings": 2 * length}
    model = write_model(KINDS["gemma3"] | changes, folder / name)
    well = DemoWell(folder / f"well-{name}", 1 << 30, settings={"block_tokens": PAGE, "canary": 0})
    pages = (length // PAGE + 64) * (1 if name == "full" else LAYERS)
    extra = {"skip_tokenizer_init": True, "max_num_batched_tokens": 2048}
    config = EngineConfig(model, PAGE, pages, length + PAGE, well.connector(), "float32", extra=extra)
    try:
        with EngineProcess.start(config, folder / f"{name}.log") as engine:
            system = System(kinds.count("full_attention"), engine, well)
            warm_up = [5 + at % 50 for at in range(9 * PAGE)]
            system.ask(warm_up)
            system.pair(warm_up)
            yield system
    finally:
        well.stop()


def _stored(name: str, system: System, prompt: list[int]) -> Row:
    before = system.well.figure("block_bytes") or 0
    system.ask(prompt)
    system.pair(prompt)
    stored = (system.well.figure("block_bytes") or 0) - before
    needed = len(prompt) * system.layers * TOKEN_BYTES
    estimate = stats.Estimate(stored / needed, stored / needed, stored / needed, 1)
    what = f"{len(prompt):,} tokens, {name}: bytes stored over those of layers that keep all"
    target = Target("<=", MOST_BYTES) if len(prompt) == 32768 else None
    return Row(what, "", estimate, target, f"{stored / len(prompt):,.0f} bytes a token")


def _times(length: int, taken: dict[str, list[tuple[Answer, Answer]]]) -> list[Row]:
    rows, ratios = [], {}
    for name, pairs in taken.items():
        fair = [(recall, hit) for recall, hit in pairs if recall.cached_tokens == hit.cached_tokens]
        where = f"{length:,} tokens, {name}"
        ratios[name] = stats.median([recall.ttft_s / hit.ttft_s for recall, hit in fair])
        rows += [
            Row(f"{where}: TTFT recalled over an engine hit", "", ratios[name]),
            Row("  recalled", "ms", stats.median([recall.ttft_s for recall, _ in fair]).times(1e3)),
            Row("  engine hit", "ms", stats.median([hit.ttft_s for _, hit in fair]).times(1e3)),
        ]
    over = ratios["windows"].times(1 / ratios["full"].value)
    rows.append(Row(f"{length:,} tokens: the first ratio over the second", "", over, Target("<=", MOST_RATIO)))
    return rows
