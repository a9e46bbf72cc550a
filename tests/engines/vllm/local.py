"""Harness engines over an in-process well: deterministic, no threads on the request path."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lab.rig.late_device import LateDevice
from stepwell.engines.paged.gpu.copies import GpuCopies
from stepwell.engines.paged.gpu.device import CopyMethod, Direction
from stepwell.engines.paged.pool import pool_of
from stepwell.engines.vllm.connector import StepwellConnector
from stepwell.engines.vllm.scheduler.half import SchedulerHalf
from stepwell.hierarchy.arena.records import Entry
from stepwell.hierarchy.local import LocalWell
from stepwell.hierarchy.local import open_well as open_any_well
from stepwell.io.memory import Mapping
from stepwell.policies.decide import RecallMode
from stepwell.testing.sparse import SparseMemory

from .build import Setup
from .harness import Harness
from .outcome import Outcome


class Engine(Harness):
    """A harness whose connector joined `well`."""

    def __init__(self, setup: Setup, well: LocalWell) -> None:
        self.well = well
        with joining(well):
            super().__init__(setup)

    def restart_engine(self, *, kill: bool = False, **changes: Any) -> None:
        with joining(self.well):
            super().restart_engine(kill=kill, **changes)

    @property
    def half(self) -> SchedulerHalf:
        assert self.connector is not None
        return self.connector._sched

    @property
    def client(self) -> Any:
        return self.connector._client

    @property
    def worker_clients(self) -> list[Any]:
        return [w.connector._client for w in self.workers]

    def forget(self) -> None:
        """The engine's own prefix cache forgets everything, when nothing runs."""
        assert self.reset_prefix_cache() or not self.setup.prefix_caching

    def recall(self, tokens: list[int], **add: Any) -> Outcome:
        """Serves a prompt that only the well remembers."""
        self.forget()
        return self.serve(tokens, **add)

    def right(self, outcome: Outcome, reason: str = "length") -> bool:
        """It ended well, with the tokens that its prompt leads to."""
        expected = self.chain(outcome.request_id).output(len(outcome.tokens))
        return outcome.finish_reason == reason and outcome.tokens == expected

    def entries(self) -> list[Entry]:
        """The well's blocks, oldest first."""
        return list(self.well.hierarchy.index.values())

    def stat(self, name: str) -> Any:
        return self.well.stats().get(name, 0)

    def counted(self, name: str) -> int:
        """What the engine side counted, reported or not."""
        return self.client._counts[name] + self.stat(f"engine_{name}")

    def settle(self) -> None:
        """Copies that run have ended, and it was noticed."""
        for worker in self.workers:
            work = worker.connector._work
            if isinstance(work._copies, GpuCopies):
                work._copies.device.drain()
                work._poll()

    def assert_quiet(self) -> None:
        """Nothing wrong, nothing held, nothing remembered: neither in the engine, nor in the connector or the well."""
        self.settle()
        self.assert_clean()
        self.well.check()
        half = self.half
        left = half.tracked, half.busy, half.live.spilling, half.live.lingering, self.client._asks, self.client._spills
        assert not any(left), left
        for name in ("pinned_bytes", "leased_blocks", "filling", "quarantined_slots"):
            assert self.stat(name) == 0, name

    @contextmanager
    def spoiled(self, *blocks: int, rank: int = 0) -> Iterator[None]:
        """Slots of these blocks (numbers in `entries`) change between every offer and its load in here."""
        recall, entries = self.client.recall, self.entries()

        def then_spoil(*args: Any, **more: Any) -> Any:
            answer = recall(*args, **more)
            for number in blocks:
                slab, slot = entries[number].slots[rank]
                slab.renew(slot)
            return answer

        with patch.object(self.client, "recall", then_spoil):
            yield


def open_well(host: str | int = "32MiB") -> LocalWell:
    """A well that recalls whatever it has, also on a machine on which a copy took so long that computing looks
    cheaper."""
    return open_any_well(host, recall=RecallMode.ALWAYS, memory=SparseMemory())


@contextmanager
def joining(well: LocalWell, find: Callable[[], Any] | None = None) -> Iterator[None]:
    """Connectors made in here join this well, without threads, and touch its pages only where they copy."""
    with (
        patch.object(Mapping, "populate", lambda *_, **__: None),
        patch.object(StepwellConnector, "dialler", staticmethod(lambda settings: find or (lambda: well.dial))),
        patch.object(StepwellConnector, "threaded", False),
    ):
        yield


@contextmanager
def late(seed: int | None, *, early: bool = False) -> Iterator[list[LateDevice]]:
    """Connectors made in here copy by a device that is late, as on a GPU, one each; it is in the list then. `early`: it
    copies out of pages as early as it may."""
    devices: list[LateDevice] = []

    def copier(kv_caches: Any, num_pages: int) -> GpuCopies:
        pool = pool_of(kv_caches, num_pages)
        devices.append(LateDevice(seed, at_once=True, early=pool if early else None))
        return GpuCopies(pool, devices[-1], dict.fromkeys(Direction, CopyMethod.ENGINE))

    with (
        patch.object(StepwellConnector, "copier", staticmethod(copier)),
        patch.object(StepwellConnector, "lanes", False),
    ):
        yield devices


def setup_in(folder: Path, *, extra: dict[str, Any] | None = None, **fields: Any) -> Setup:
    """An engine with a block per page, and receipts, unless `extra` says otherwise."""
    block = fields.get("page", 16)
    settings = {"home": str(folder / "home"), "weights_id": "w", "block_tokens": block, "receipts": True}
    return Setup("StepwellConnector", folder / "model", extra={**settings, **(extra or {})}, **fields)


@contextmanager
def engine(
    folder: Path, *, host: str | int = "32MiB", extra: dict[str, Any] | None = None, **fields: Any
) -> Iterator[Engine]:
    """One engine on a well of its own, whose books are checked at the end."""
    with open_well(host) as well, Engine(setup_in(folder, extra=extra, **fields), well) as h:
        yield h
        well.check()


def prompt(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(32_000) for _ in range(length)]


def come_and_go(
    h: Engine,
    prompts: list[list[int]],
    dice: random.Random,
    *,
    steps: int,
    at_once: int,
    answers: int,
    resets: float = 0.0,
) -> None:
    """Requests for these prompts, `at_once` at a time, with answers shorter than `answers`: some are preempted, some
    aborted, and some answers become a part of the next prompt. `resets`: how often the engine's cache forgets all."""
    live: list[str] = []
    for _ in range(steps):
        live = [rid for rid in live if h.requests[rid].finish_reason is None]
        if len(live) < at_once:
            live.append(h.add(dice.choice(prompts), max_tokens=dice.randrange(1, answers)))
        running = [rid for rid in live if h.status(rid) == "RUNNING"]
        if running and dice.random() < 0.05:
            h.preempt(dice.choice(running))
        if dice.random() < 0.03:
            h.abort(dice.choice(live), mid_step=dice.random() < 0.5)
        if resets and dice.random() < resets:
            h.reset_prefix_cache()
        h.step()
        if dice.random() < 0.1 and (ended := [r for r in h.finished.values() if r.finish_reason == "length"]):
            turn = dice.choice(ended)
            if len(turn.prompt) < 350:
                prompts[dice.randrange(len(prompts))] = turn.prompt + turn.tokens
    h.run()
