"""Loads that are streams: they begin before the well has read what they load: over a tier whose time a test moves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

pytest.importorskip("vllm.v1.kv_offload.tiering.manager", reason="this vLLM has no secondary tiers")

from vllm.v1.kv_offload.base import LookupResult

from stepwell.client.patience import TOTAL_S
from stepwell.client.scheduler import SchedulerClient
from stepwell.hierarchy.core import Limits, Options, System
from stepwell.hierarchy.hierarchy import Hierarchy
from stepwell.hierarchy.levels import level, reads
from stepwell.hierarchy.local import InlineExecutor, LocalWell
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.policies.decide import RecallMode
from stepwell.testing.clock import SetClock
from stepwell.testing.sparse import SparseMemory
from stepwell.vault.keyring import Keyring

from .offloading import Offloading, content, keys_of, offloading
from .slow import SlowTier

CHUNKS, BLOCK_S = 8, 0.01
KEYS = keys_of("a", CHUNKS)
_PASSES = 20_000  # within which a job that has ended is seen


class Streaming:
    """An engine whose chunks are in a tier alone; each read of one takes BLOCK_S of `clock`, which is the client's too.
    `arrive` has the tier answer so many more."""

    def __init__(self, engine: Offloading, well: LocalWell, tier: SlowTier, clock: SetClock) -> None:
        self.engine, self.well, self.tier, self.clock = engine, well, tier, clock
        self.context = engine.request("r")

    @property
    def client(self) -> SchedulerClient:
        session = self.engine.tier._session
        assert session is not None
        return session.client

    def put(self, keys: Sequence[bytes], name: str) -> None:
        """These chunks are in the tier alone from here on."""
        hierarchy = self.well.hierarchy
        self.engine.store(keys, name)
        while not hierarchy.stack.levels[0].writes.idle:
            self.arrive(1)
        for entry in reversed(list(hierarchy.index.values())):
            hierarchy.arena.drop(entry, "evicted")
        self.engine.forget()

    def begin(self) -> None:
        """The request is looked up until its job has begun; nothing has come yet."""
        soon(lambda: self.engine.look(KEYS, self.context) is None and self._step())
        assert self._jobs() == 1 and self.loaded() == 0

    def _step(self) -> bool:
        self.engine.step()
        return self._jobs() > 0

    def _jobs(self) -> int:
        transfers = self.engine.tier._transfers
        assert transfers is not None
        return transfers._jobs

    def arrive(self, chunks: int) -> None:
        for _ in range(chunks):
            self.clock.advance(BLOCK_S)
            self.tier.tick()
            self.well.pump()

    def loaded(self) -> int:
        """Leading chunks whose bytes are in the rows of this job, which the engine was not told of yet."""
        rows = self.engine.rows
        stored = {content(key, rows.shape[1]).tobytes() for key in KEYS}
        return sum(bytes(row) in stored for row in rows)


def soon(condition: Callable[[], bool]) -> None:
    """Threads copy meanwhile."""
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@contextmanager
def streaming(folder: Path, rows: int = 64) -> Iterator[Streaming]:
    clock, executor = SetClock(1000.0), InlineExecutor()
    tier = SlowTier(1 << 40, executor, clock)
    hierarchy = Hierarchy(
        Limits(32 << 20, queue_bytes=16 << 20),
        System(clock, executor, SparseMemory()),
        Sealing(Keyring.ephemeral(), sealed=True, wall=clock.now),
        Options(recall=RecallMode.ALWAYS),
        well="slow",
        tiers=(tier,),
    )
    hierarchy.recover()
    with (
        patch.object(level, "MAX_BATCH", 1),
        patch.object(reads, "MAX_BATCH", 1),
        patch.object(reads, "MIN_BATCH", 1),
        LocalWell(hierarchy, executor) as well,
        offloading(folder, well, rows=rows) as engine,
    ):
        session = engine.tier._session
        assert session is not None
        session.client._clock = session.worker._streams.clock = clock.now
        load = Streaming(engine, well, tier, clock)
        load.put(KEYS, "s")
        engine.rows[:] = 0
        tier.block_s = BLOCK_S
        try:
            yield load
        finally:
            tier.hung = False
            load.arrive(2 * CHUNKS)  # no thread waits any more
        well.check()


def test_chunks_are_copied_as_they_come(tmp_path: Path) -> None:
    with streaming(tmp_path) as load:
        load.begin()
        for came in range(1, CHUNKS):
            load.arrive(1)
            soon(lambda: load.loaded() == came)  # noqa: B023 - it is called here
            assert load.engine.look(KEYS, load.context) is None
        load.arrive(1)
        assert load.engine.hits(KEYS, load.context) == CHUNKS
        load.engine.assert_loaded(KEYS, load.context)
        assert load.tier.asked == list(dict.fromkeys(load.tier.asked)) and len(load.tier.asked) == CHUNKS


def test_what_does_not_come_in_time_is_a_miss(tmp_path: Path) -> None:
    with streaming(tmp_path) as load:
        load.begin()
        load.arrive(3)
        soon(lambda: load.loaded() == 3)
        load.tier.hung = True
        load.clock.advance(TOTAL_S)
        assert load.engine.hits(KEYS, load.context, passes=_PASSES) == 3
        load.engine.assert_loaded(KEYS[:3], load.context)
        assert load.engine.manager.primary_tier.lookup(KEYS[3], load.context) is LookupResult.MISS
        assert not load.client._asks and not load.client._streams


def test_a_drain_does_not_wait_for_what_is_read(tmp_path: Path) -> None:
    with streaming(tmp_path) as load:
        load.begin()
        load.arrive(2)
        load.tier.hung = True
        drained = threading.Thread(target=load.engine.tier.drain_jobs)
        drained.start()
        drained.join(TOTAL_S / 2)
        assert not drained.is_alive()
        soon(lambda: load.engine.manager.has_pending_work() is False or load._step() is False)
        assert not load.client._asks and not load.client._streams


def test_a_load_of_which_nothing_comes_holds_nothing(tmp_path: Path) -> None:
    with streaming(tmp_path) as load:
        load.begin()
        load.tier.hung = True
        load.clock.advance(TOTAL_S)
        assert load.engine.hits(KEYS, load.context, passes=_PASSES) == 0
        assert not load.client._asks and not load.client._streams


def test_a_well_that_is_lost_ends_the_load(tmp_path: Path) -> None:
    with streaming(tmp_path) as load:
        load.begin()
        load.arrive(2)
        soon(lambda: load.loaded() == 2)
        session = load.engine.tier._session
        assert session is not None
        session.worker.lost()
        load.client.lost()
        assert load.engine.hits(KEYS, load.context, passes=_PASSES) == 2
        load.engine.assert_loaded(KEYS[:2], load.context)


def test_memory_that_goes_in_the_middle_costs_no_block(tmp_path: Path) -> None:
    """The worker's link is lost first: what is found and cannot be copied is as good as it was."""
    with streaming(tmp_path) as load:
        load.begin()
        load.arrive(2)
        soon(lambda: load.loaded() == 2)
        blocks = load.well.stats()["disk_blocks"]
        session = load.engine.tier._session
        assert session is not None
        session.worker._slabs.retire_all()
        load.arrive(CHUNKS)
        assert load.engine.hits(KEYS, load.context, passes=_PASSES) == 2
        assert load.well.stats()["disk_blocks"] == blocks == CHUNKS


def test_why_chunks_did_not_come_is_counted(tmp_path: Path) -> None:
    with streaming(tmp_path) as load:
        load.begin()
        load.arrive(3)
        load.tier.hung = True
        load.clock.advance(TOTAL_S)
        assert load.engine.hits(KEYS, load.context, passes=_PASSES) == 3
        counts = load.engine.manager.get_stats().reduce()
        missed = [name for name in counts if "stepwell_misses" in name]
        assert len(missed) == 1 and ("too_slow" in missed[0] or "tier_down" in missed[0]), counts
        assert not [name for name in counts if "stepwell_errors" in name]


def test_what_is_in_the_arena_does_not_wait_for_what_is_read(tmp_path: Path) -> None:
    """Rows are left for it, and threads; another load that is read waits for its turn."""
    with streaming(tmp_path, rows=11) as load:
        there, below = keys_of("b", 2), keys_of("c", 2)
        load.put(below, "s3")
        load.engine.store(there, "s2")
        load.engine.forget()
        load.begin()
        load.tier.hung = True
        other = load.engine.request("r3")
        for _ in range(10):
            assert load.engine.look(below, other) is None and load._step()
        assert load.engine.hits(there, load.engine.request("r2"), passes=_PASSES) == 2
        load.tier.hung = False


def test_a_thread_that_cannot_be_started_leaves_no_job_behind(tmp_path: Path) -> None:
    """Its job would run later, over rows that are another's by then."""
    with streaming(tmp_path) as load, patch.object(threading.Thread, "start", side_effect=RuntimeError("no more")):
        keys = keys_of("b", 3)
        load.engine.store(keys, "s2")
        load.engine.forget()
        assert load.engine.hits(keys, load.engine.request("r2"), passes=_PASSES) == 3


def test_a_short_request_passes_a_long_one(tmp_path: Path) -> None:
    with streaming(tmp_path) as load:
        short = keys_of("short", 2)
        known = set(load.tier.blocks)
        load.put(short, "t")
        ids = set(load.tier.blocks) - known
        load.tier.asked.clear()
        load.begin()
        behind = load.engine.request("behind")
        soon(lambda: load.engine.look(short, behind) is None and not load.engine.step() and load._jobs() == 2)
        load.arrive(CHUNKS + 2)
        assert len(load.tier.asked) == len(set(load.tier.asked)) == CHUNKS + 2
        assert not ids & set(load.tier.asked[-2:]), "the last that are read are the long one's"
