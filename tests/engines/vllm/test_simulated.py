"""`stepwell simulate` and the connector agree on models with several cache groups: on what is stored and recalled."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs the engine")

from stepwell.block.digest import Chain
from stepwell.policies.catalog import POLICIES
from stepwell.simulate.groups.model import ModelGroups
from stepwell.simulate.groups.replay import GroupsReplay
from stepwell.simulate.traces.trace import Trace

from .build import STATE
from .local import Engine, engine, prompt
from .outcome import Outcome

PAGE = 16
MODELS: dict[str, tuple[int, ...]] = {
    "one window": (40, 0),
    "five to one": (33, 33, 33, 33, 33, 0),
    "two spans": (20, 100, 0),
    "states": (STATE, STATE, STATE, 0),
    "states and windows": (STATE, 40, 0),
}


def model_of(windows: tuple[int, ...]) -> ModelGroups:
    """One layer of each group: all of them take as much of a token, and a state as much as a block."""
    spans = tuple((span, 1) for span in windows if span > 0)
    return ModelGroups(1, spans, (PAGE,) * windows.count(STATE))


def conversations(h: Engine, dice: random.Random) -> list[Outcome]:
    """Prompts that are new, that part from others in their middle, and that go on behind an answer: only these have
    the last whole block of another prompt, by which a trace shows what its answer was."""
    said: list[Outcome] = []
    for number in range(24):
        fresh = prompt(dice.randrange(PAGE, 120), seed=100 + number)
        how = dice.choice(["new", "parts", "goes on", "goes on"]) if said else "new"
        before = dice.choice(said) if said else None
        known: list[int] = []
        if before is not None and how == "parts":
            known = before.prompt[: dice.randrange(PAGE - 1, len(before.prompt) // PAGE * PAGE)]
        elif before is not None and how == "goes on":
            known = [*before.prompt, *before.tokens]
        said.append(h.recall([*known, *fresh][:480], max_tokens=dice.choice([1, 5, 16, 40])))
    return said


def trace_of(said: list[Outcome]) -> Trace:
    ids: dict[bytes, int] = {}
    paths: list[list[int]] = []
    for outcome in said:
        chain = Chain(PAGE)
        chain.extend(outcome.prompt)
        digests = [chain.digests[at : at + 32] for at in range(0, len(chain.digests), 32)]
        paths.append([ids.setdefault(digest, len(ids)) for digest in digests])
    return Trace(
        "said",
        PAGE,
        np.arange(len(said), dtype=np.float64),
        np.array([len(outcome.prompt) for outcome in said]),
        np.array([len(outcome.tokens) for outcome in said]),
        np.full(len(said), -1),
        np.cumsum([0, *map(len, paths)]),
        np.array([id for path in paths for id in path], np.int64),
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", MODELS)
def test_the_same_is_stored_and_recalled(tmp_path: Path, kind: str, seed: int) -> None:
    windows = MODELS[kind]
    fields: dict[str, Any] = {"layers": len(windows), "windows": windows, "max_model_len": 600, "num_pages": 513}
    with engine(tmp_path, host="64MiB", extra={"block_tokens": PAGE}, **fields) as h:
        said = conversations(h, random.Random(seed))
        entries = h.entries()
        tails = sum(entry.position < 0 for entry in entries)
        h.assert_quiet()
    replay = GroupsReplay(trace_of(said), model_of(windows), POLICIES["lru"](), 1 << 20, lambda first, last: 1.0)
    hits = replay.run().hits * PAGE
    assert hits.tolist() == [outcome.external for outcome in said]
    held = [part for part in replay.store.parts.values() if part.held]
    assert (sum(part.is_tail for part in held), len(held)) == (tails, len(entries))
