"""Streamed recalls from disk beside staged ones, and beside a bare read and a copy of as many bytes.

Every pass begins with nothing in host memory and with the disk's files out of the page cache. The passes of a
repetition follow each other, and another one begins each time. The bare read has as many threads as the well, O_DIRECT
and requests as large as the tier's; behind it the same bytes are copied from shared memory, as the arena is.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from lab.bench import wells
from lab.bench.disk.lane import REQUEST, THREADS, Arena, Bare, cipher_work, in_threads
from lab.bench.report import Result, Row, Target
from lab.bench.streams.runs import Engine, Run
from lab.bench.streams.timeline import timeline
from stepwell.block.layout import MiB
from stepwell.client import control
from stepwell.demo.model import cache_folder
from stepwell.demo.page_cache import drop_page_cache
from stepwell.demo.results import stats
from stepwell.demo.results.stats import Estimate

HOST, SMALL_HOST = 768 * MiB, 64 * MiB
TOGETHER = 4
MOST, ALL = Target("<=", 1.08), Target(">=", 1.0)


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of a run that host memory holds and of one that it does not, and how often each is recalled."""

    run: int
    long: int
    repetitions: int
    long_repetitions: int
    timelines: int


FULL, QUICK = Size(64 * MiB, 512 * MiB, 40, 16, 25), Size(16 * MiB, 128 * MiB, 2, 2, 1)


def run(quick: bool) -> Result:
    size = QUICK if quick else FULL
    rows: list[Row] = []
    counts = {"repetitions": size.repetitions, "of_the_long_run": size.long_repetitions, "incomplete": 0, "wrong": 0}
    for block, runs in ((4 * MiB, TOGETHER), (MiB, 1)):
        with stand(HOST, block, size.run, runs) as here:
            rows += here.one(size.repetitions)
            rows += here.together(size.repetitions) if runs > 1 else []
            here.count(counts)
    with stand(SMALL_HOST, 4 * MiB, size.long, 1) as here:
        rows += here.long(size.long_repetitions)
        here.count(counts)
    remarks = [
        f"sealed blocks; {THREADS} threads that read and requests of {REQUEST // MiB} MiB, also in the bare read; host"
        f" memory of {HOST // MiB} MiB, for the long run {SMALL_HOST // MiB} MiB; one thread copies a run",
    ]
    more = {"timeline": timeline(4 * MiB, size.run, size.timelines)}
    return Result("stream", rows, counts, remarks, more)


class Stand:
    """A well with a disk, an engine whose runs are there, and a bare file beside them. `staged`: host memory has room
    for all of the runs."""

    def __init__(self, home: Path, base: Path, block: int, nbytes: int, runs: int, *, staged: bool) -> None:
        self._home, self._disk = home, base / "disk"
        self._what = f"{nbytes // MiB} MiB in blocks of {block // MiB} MiB"
        self._engine = Engine(home, block)
        self._runs = [Run(seed, nbytes // block, block) for seed in range(runs)]
        self._arena = Arena(block, nbytes // block)
        self._bare = Bare(base, "bare", nbytes)
        self._bare.create()
        self._bare.move(REQUEST, write=True)
        for each in self._runs:
            self._engine.spill(each, partial(control.stats, home))
        self._shares: list[float] = []  # of their blocks that runs got, in all passes
        self._pinned: list[int] = []
        self._wrong = sum(self._verified(streamed) for streamed in ((True, False) if staged else (True,)))

    def _verified(self, streamed: bool) -> int:
        """Wrong blocks of a pass that is not timed. After each piece, it is seen how much is pinned."""
        for each in self._runs:
            each.memory[:] = 0
        self._engine.pieces = lambda: self._pinned.append(int(control.stats(self._home)["pinned_bytes"]))
        self._recall(self._runs, streamed)
        self._engine.pieces = lambda: None
        return sum(each.wrong() for each in self._runs)

    def _forget(self) -> None:
        control.clear(self._home, ["host"])
        drop_page_cache(self._disk)

    def _recall(self, runs: Sequence[Run], streamed: bool) -> list[float]:
        self._forget()
        ended = self._engine.recall(*runs, streamed=streamed)
        self._shares += [blocks / each.blocks for each, (_, blocks) in zip(runs, ended, strict=True)]
        return [seconds for seconds, _ in ended]

    def _read(self, *, opening: bool = False) -> list[float]:
        """A bare read and then a copy. `opening`: the read is beside one pass of the cipher over as many bytes."""
        self._forget()
        began = time.perf_counter()
        read, cipher = partial(self._bare.move, REQUEST, write=False), partial(cipher_work, self._arena, opening=True)
        in_threads([read, cipher] if opening else [read])
        for slot, row in enumerate(self._runs[0].memory):
            np.copyto(row, self._arena.slab.payload(slot))
        return [time.perf_counter() - began]

    def one(self, repetitions: int) -> Iterator[Row]:
        first = self._runs[:1]
        streamed, staged = (partial(self._recall, first, streamed) for streamed in (True, False))
        ours, waited, bare, opened = _singles([streamed, staged, self._read, self._opened], repetitions)
        yield from _over_bare(self._what, ours, bare, opened)
        yield Row("  streamed / staged", "", _ratio(ours, waited), None, _beside(ours, waited))

    def _opened(self) -> list[float]:
        return self._read(opening=True)

    def together(self, repetitions: int) -> Iterator[Row]:
        passes = [partial(self._recall, self._runs, streamed) for streamed in (True, False)]
        streamed, staged = _in_turn(passes, repetitions)
        for name, of in (("mean", np.mean), ("the worst", np.max)):
            ours, theirs = ([float(of(seconds)) for seconds in each] for each in (streamed, staged))
            what = f"{len(self._runs)} runs of these together, {name}: streamed / staged"
            yield Row(what, "", _ratio(ours, theirs), None, _beside(ours, theirs))

    def long(self, repetitions: int) -> Iterator[Row]:
        self._shares.clear()
        ours, bare, opened = _singles([partial(self._recall, self._runs, True), self._read, self._opened], repetitions)
        host = int(control.stats(self._home)["host_bytes"])
        what = f"{self._what}, through {host // MiB} MiB of host memory"
        least = min(self._shares)
        yield Row(f"{what}: blocks recalled, at least", "", Estimate(least, least, least, repetitions), ALL)
        yield from _over_bare(what, ours, bare, opened)
        most = max(self._pinned) / MiB
        yield Row("  pinned at most", "MiB", Estimate(most, most, most, len(self._pinned)))

    def count(self, counts: dict[str, int]) -> None:
        counts["incomplete"] += sum(share < 1 for share in self._shares)
        counts["wrong"] += self._wrong

    def close(self) -> None:
        self._engine.close()
        self._bare.close()
        self._arena.close()


@contextmanager
def stand(host: int, block: int, nbytes: int, runs: int) -> Iterator[Stand]:
    cache_folder().mkdir(parents=True, exist_ok=True)
    base = Path(tempfile.mkdtemp(prefix="bench-stream-", dir=cache_folder()))
    try:
        with wells.well(host, disk=f"{base / 'disk'}:4GiB", disk_reserve="1GiB", recall="always") as home:
            here = Stand(home, base, block, nbytes, runs, staged=2 * runs * nbytes <= host)
            try:
                yield here
            finally:
                here.close()
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _in_turn(passes: Sequence[Callable[[], list[float]]], repetitions: int) -> list[list[list[float]]]:
    """For each pass, what it gave in each repetition."""
    found: list[list[list[float]]] = [[] for _ in passes]
    for repetition in range(repetitions):
        for at in range(len(passes)):
            which = (at + repetition) % len(passes)
            found[which].append(passes[which]())
    return found


def _singles(passes: Sequence[Callable[[], list[float]]], repetitions: int) -> list[list[float]]:
    return [[seconds for (seconds,) in each] for each in _in_turn(passes, repetitions)]


def _over_bare(what: str, ours: Sequence[float], bare: Sequence[float], opened: Sequence[float]) -> Iterator[Row]:
    yield Row(f"{what}: streamed / bare read and copy", "", _ratio(ours, bare), MOST, _beside(ours, bare))
    name = "  streamed / bare read beside the cipher's pass, and copy"
    yield Row(name, "", _ratio(ours, opened), None, _beside(ours, opened))


def _ratio(above: Sequence[float], below: Sequence[float]) -> Estimate:
    return stats.median([one / other for one, other in zip(above, below, strict=True)])


def _beside(above: Sequence[float], below: Sequence[float]) -> str:
    one, other = (1e3 * stats.median(seconds).value for seconds in (above, below))
    return f"{one:.1f} of {other:.1f} ms"
