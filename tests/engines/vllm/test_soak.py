"""Everything at once, at random: whatever happens in whatever order, nothing wrong is read and nothing is left."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the engine")

from lab.rig.suite.amount import some_or_many
from stepwell.client.patience import Patience

from .harness import Harness
from .local import Engine, engine, late, prompt
from .test_faults import lose, rejoin

ENGINES: list[dict[str, Any]] = [
    {"num_pages": 49, "max_seqs": 6, "batch_tokens": 96},
    {"num_pages": 49, "max_seqs": 6, "batch_tokens": 96, "ranks": 2, "extra": {"block_tokens": 64}},
    {"num_pages": 49, "max_seqs": 6, "async_scheduling": True, "policy": "priority", "extra": {"block_tokens": 32}},
    {"num_pages": 33, "max_seqs": 5, "page": 32, "runner_v2": True, "prefix_caching": False, "uneven": True},
    {"num_pages": 49, "max_seqs": 6, "batch_tokens": 96, "ranks": 2, "extra": {"canary": 1}},
]


class Soak:
    def __init__(self, h: Engine, seed: int) -> None:
        self.h, self.rng, self.serial, self.weights = h, random.Random(seed), seed * 1000, 0
        self.alive: list[str] = []
        self.aborted: set[str] = set()

    def tokens(self) -> list[int]:
        """One of few heads, so that prefixes are shared, and a tail."""
        head = prompt(400, seed=self.rng.randrange(4))[: self.rng.choice((40, 96, 200, 320))]
        return head + prompt(self.rng.randrange(1, 120), seed=self.rng.randrange(6))

    def step(self) -> None:
        h, rng = self.h, self.rng
        self.alive = [rid for rid in self.alive if h.requests[rid].finish_reason is None and h.request(rid)]
        running = [r.request_id for r in h.scheduler.running]
        match rng.randrange(60):
            case n if n < 12 and len(self.alive) < 10:
                salt = rng.choice((None, None, "s"))
                self.alive.append(
                    h.add(self.tokens(), max_tokens=rng.randrange(1, 40), salt=salt, priority=len(self.alive) % 3)
                )
            case n if n < 15 and self.alive:
                rid = rng.choice(self.alive)
                self.aborted.add(rid)
                h.abort(rid, mid_step=rng.random() < 0.5)
            case n if n < 18 and running:
                h.preempt(rng.choice(running))
            case n if n < 21:
                for entry in h.entries():
                    if rng.random() < 0.3 and entry.state.name == "RESIDENT":
                        slab, slot = rng.choice(entry.slots)
                        slab.renew(slot)
            case 21 if not h._in_flight:
                self.reset()
            case 22:
                lose(h)
                h.step()
                h.settle()  # or a worker would have to say that it still copies
                rejoin(h)
            case 23 if not h._in_flight:
                Harness.run(h, 3000)
                h.assert_quiet()
                h.restart_engine(kill=rng.random() < 0.3, weights=0)  # those that its weights_id names
                h.client._patience = Patience(0.01, 0.05)
                self.alive = []
            case 24:
                h.forget() if not h.scheduler.requests else None
        h.step()

    def reset(self) -> None:
        """New weights; vLLM refuses that while a request is parked or held."""
        try:
            self.h.update_weights(self.weights + 1)
        except RuntimeError:
            return
        self.weights += 1


@pytest.mark.parametrize(("seed", "setup"), list(enumerate(ENGINES)), ids=str)
def test_anything_in_any_order(tmp_path: Path, seed: int, setup: dict[str, Any]) -> None:
    soak(tmp_path, seed, setup)


@pytest.mark.parametrize(("seed", "setup"), list(enumerate(ENGINES)), ids=str)
@some_or_many("steps", 120, 1000)
def test_anything_in_any_order_with_copies_beside_the_forward(
    tmp_path: Path, seed: int, setup: dict[str, Any], steps: int
) -> None:
    """Pages are poisoned as soon as the engine has them, while the device still dallies with copies out of them."""
    with late(seed) as devices:
        soak(tmp_path, seed, setup, steps)
    assert sum(device.copied_bytes for device in devices) > 50 * 16 * 256


@pytest.mark.parametrize(("seed", "setup"), list(enumerate(ENGINES)), ids=str)
def test_anything_in_any_order_with_copies_that_are_early(tmp_path: Path, seed: int, setup: dict[str, Any]) -> None:
    """The engine's steps are late, on a GPU: copies beside a step see nothing of it."""
    with late(seed, early=True):
        soak(tmp_path, seed, setup)


def soak(tmp_path: Path, seed: int, setup: dict[str, Any], steps: int = 150) -> None:
    print(f"seed {seed}")
    with engine(tmp_path, **setup) as h:
        h.client._patience = Patience(0.01, 0.05)
        soak = Soak(h, seed)
        for step in range(steps):
            soak.step()
            if step % 10 == 0:
                h.well.check()
            assert not h.violations, "\n".join(map(str, h.violations))
        h.run(4000)
        for rid, outcome in h.requests.items():
            if outcome.finish_reason not in (None, "abort"):
                assert h.right(outcome), rid
        h.assert_clean()
        assert h.half.tracked == 0 and not h.half.busy
        print(h.stat("recalled_blocks"), "blocks recalled,", h.stat("canaries_clean"), "clean canaries")
        if h.setup.extra.get("canary"):
            assert h.counted("canaries") > 5
        else:
            assert h.stat("recalled_blocks") > 3, "it was worth the name"
        assert (h.stat("canaries_mismatched"), h.stat("quarantined_namespaces")) == (0, 0)
