"""The copies between slots of the arena and rows of vLLM's host memory, in threads of their own.

Every job ends once, with what became of it, whatever happens: until it is reported its rows stay pinned and the engine
keeps stepping. A load's bytes were verified when the well brought them into the arena, and a slot is looked at again
behind its copy: a row counts as loaded only if it holds what was leased. A load may begin before its bytes have landed:
then it is a stream, whose chunks are copied in their order, each as it lands, and what has not landed within the
client's own limits is not loaded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np
import numpy.typing as npt

from stepwell.client.questions import SlotRefs, Spill
from stepwell.client.scheduler import MAX_RESERVED, SchedulerClient
from stepwell.client.streams import Stream
from stepwell.client.worker import Hold, WorkerClient
from stepwell.engines.vllm.offloading.lookups import LoadPart, digest_of_key, group_of
from stepwell.errors import IntegrityError

Rows = npt.NDArray[np.uint8]
"""vLLM's host memory, of shape (chunks, bytes of a chunk)."""

LOADERS, READERS = 2, 8
"""Threads that load what is in the arena, and what is still read below it, each of which mostly waits."""

_LOOK_S = 0.005
"""Seconds between two looks at the limits of a stream that waits."""

STORE_S = 2.0
"""Seconds that a store may wait for its next slot: they become free as blocks are written below the arena."""

MAX_STORING = 0.75
"""Share of vLLM's rows that stores may hold; more are refused, or nothing could be evicted there."""

_POLLS_S = (0.0002, 0.005)

CopyResult = tuple[list[bytes], int, str]
"""Keys that are where they were to go, the bytes that were copied for that, and the well's reason for fewer."""


@dataclass(frozen=True, slots=True)
class RowJob:
    """A job of vLLM's: these chunks are to be loaded into these rows, or stored from them, for a request."""

    number: int
    request: str
    load: bool
    keys: tuple[bytes, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JobEnd:
    """What became of a job. `done`: the keys whose bytes were copied, or are in the well already. `reason`: why chunks
    of a load have not come; "" if those that are not done have failed otherwise. `error`: what ended it early."""

    job: RowJob
    done: tuple[bytes, ...] = ()
    nbytes: int = 0
    seconds: float = 0.0
    reason: str = ""
    error: BaseException | None = None

    @property
    def complete(self) -> bool:
        return len(self.done) == len(self.job.keys)


@dataclass(frozen=True, slots=True)
class _Copy:
    """What a job copies of a run: `blocks` of it from `first` on, each wanted one to its key's row. All of them have
    landed, or they come by the `stream` of a transfer."""

    part: LoadPart
    wanted: dict[int, tuple[bytes, int]]
    first: int
    blocks: int
    transfer: int = 0
    stream: Stream | None = None


class RowTransfers:
    """`submit_load`, `submit_store` and `ended` are for one thread, the scheduler's, and never wait."""

    def __init__(self, client: SchedulerClient, worker: WorkerClient, rows: Rows) -> None:
        """Starts all threads: one that could not be started later would leave its job in the queue, to run when the
        rows are another's. Raises RuntimeError where the system allows no more."""
        self._client = client
        self._worker = worker
        self._rows: Rows | None = rows
        self._chunk_bytes = rows.shape[1]
        self._most_storing = max(1, int(rows.shape[0] * MAX_STORING))
        self._loaders = _started(LOADERS, "stepwell-load")
        self._readers = _started(READERS, "stepwell-read")
        self._storer = _started(1, "stepwell-store")
        self._results: SimpleQueue[JobEnd] = SimpleQueue()
        self._hurried = threading.Event()  # who waits for slots is to give up
        self._idle = threading.Condition()
        self._jobs = 0  # that wait or run
        self.busy_rows = 0  # that they hold
        self._storing = 0  # those of stores

    @property
    def unreported(self) -> bool:
        """There is a job whose end `ended` has not told yet."""
        return self._jobs > 0 or not self._results.empty()

    def submit_load(self, job: RowJob, parts: Sequence[LoadPart]) -> None:
        streamed = any(part.run.streams for part in parts)
        try:
            self._submit(self._readers if streamed else self._loaders, job, lambda: self._load(job, parts))
        except BaseException:
            for part in parts:
                self._client.release(part.ask)
            raise

    def submit_store(self, job: RowJob, epoch: int) -> None:
        if self._storing and self._storing + len(job.keys) > self._most_storing:
            self._results.put(JobEnd(job))
        else:
            self._submit(self._storer, job, lambda: self._store(job, epoch))

    def _submit(self, threads: ThreadPoolExecutor, job: RowJob, copy: Callable[[], CopyResult]) -> None:
        began = time.monotonic()
        self._count(1, len(job.keys), job.load)

        def over(future: Future[CopyResult]) -> None:
            error = None if future.cancelled() else future.exception()
            failed = future.cancelled() or error is not None
            done, nbytes, reason = ([], 0, "") if failed else future.result()
            self._results.put(JobEnd(job, tuple(done), nbytes, time.monotonic() - began, reason, error))
            self._count(-1, -len(job.keys), job.load)

        try:
            future = threads.submit(copy)
        except BaseException:
            self._count(-1, -len(job.keys), job.load)
            raise
        future.add_done_callback(over)

    def _count(self, jobs: int, rows: int, load: bool) -> None:
        with self._idle:
            self._jobs += jobs
            self.busy_rows += rows
            self._storing += 0 if load else rows
            self._idle.notify_all()

    def ended(self) -> Iterator[JobEnd]:
        """Jobs that have ended since the last call."""
        while True:
            try:
                yield self._results.get_nowait()
            except Empty:
                return

    def drain(self) -> None:
        """Returns when no thread touches a row. Whatever waits for slots gives up; a copy that runs ends."""
        self._hurried.set()
        try:
            with self._idle:
                self._idle.wait_for(lambda: self._jobs == 0)
        finally:
            self._hurried.clear()

    def close(self) -> None:
        """Ends the threads, and then refers to vLLM's memory no more."""
        self._hurried.set()
        for threads in (self._loaders, self._readers, self._storer):
            threads.shutdown(wait=True, cancel_futures=True)
        self._rows = None

    # in a thread ------------------------------------------------------------------------------------------------------

    def _load(self, job: RowJob, parts: Sequence[LoadPart]) -> CopyResult:
        """All streams of the job begin before the first copy: their blocks land meanwhile."""
        loaded: list[bytes] = []
        with ExitStack() as ends:
            for part in parts:
                ends.callback(self._client.release, part.ask)  # unless it was recalled
            copies = [copy for part in parts if (copy := self._begun(job, part, ends)) is not None]
            reasons = [self._copy(copy, loaded) for copy in copies]
        return loaded, len(loaded) * self._chunk_bytes, next(filter(None, reasons), "")

    def _begun(self, job: RowJob, part: LoadPart, ends: ExitStack) -> _Copy | None:
        """What the job wants of this run, if anything."""
        wanted = part.rows(job.keys, job.rows)
        if not wanted:
            self._client.release(part.ask)
            return None
        first, end = min(wanted), max(wanted) + 1
        if part.ask.blocks >= end:
            return _Copy(part, wanted, first, end - first)
        transfer, limits = self._client.stream(part.ask, first, end - first)
        ends.callback(self._stream_ended, part.ask.session, transfer)
        stream = ends.enter_context(self._worker.stream(part.ask.session, transfer, limits))
        return _Copy(part, wanted, first, end - first, transfer, stream)

    def _stream_ended(self, session: int, transfer: int) -> None:
        self._worker.recalled(session, [transfer])
        self._client.stream_ended(transfer)

    def _copy(self, copy: _Copy, loaded: list[bytes]) -> str:
        """Appends the keys that were loaded to `loaded`; why not all of the run came."""
        with self._worker.copying() as hold:
            if copy.stream is not None:
                return self._copy_stream(hold, copy, copy.stream, loaded)
            self._copy_landed(hold, copy, loaded)
            return ""

    def _copy_landed(self, hold: Hold, copy: _Copy, loaded: list[bytes]) -> None:
        ask = copy.part.ask
        transfer, refs = self._client.recall(ask, copy.first, copy.blocks)
        try:
            self._copy_out(hold, copy, 0, refs, loaded)
        finally:
            self._worker.recalled(ask.session, [transfer])

    def _copy_stream(self, hold: Hold, copy: _Copy, stream: Stream, loaded: list[bytes]) -> str:
        at = 0
        while at < copy.blocks:
            over = "too_slow" if self._hurried.is_set() else stream.over
            refs = stream.next(0.0 if over else _LOOK_S)
            if refs is not None:
                at += self._copy_out(hold, copy, at, refs, loaded)
                self._worker.copied(copy.part.ask.session, copy.transfer, at)
            elif over:
                return over
        return ""

    def _copy_out(self, hold: Hold, copy: _Copy, at: int, refs: SlotRefs, loaded: list[bytes]) -> int:
        """Copies blocks from the `at`th of the transfer on; how many these are. Appends the keys of those that were
        loaded."""
        rows = refs.tolist()
        for number, (ref,) in enumerate(rows, copy.first + at):
            if number in copy.wanted:
                key, row = copy.wanted[number]
                if self._copy_one(hold, copy.part, number, ref, row):
                    loaded.append(key)
        return len(rows)

    def _copy_one(self, hold: Hold, part: LoadPart, at: int, ref: tuple[int, int, int], row: int) -> bool:
        """False: the slot does not hold what was leased any more. One such chunk is one miss."""
        assert self._rows is not None
        session = part.ask.session
        try:
            self._rows[row] = hold.slot(session, *ref).bytes
            self._worker.verify(session, *ref)
        except IntegrityError:
            if self._worker.is_renewed(session, *ref):  # else the session or its memory has gone, and blocks are good
                self._client.forget(session, part.digest(at), part.epoch)
            return False
        return True

    def _store(self, job: RowJob, epoch: int) -> CopyResult:
        by_group: dict[int, list[tuple[bytes, int]]] = {}
        for key, row in zip(job.keys, job.rows, strict=True):
            by_group.setdefault(group_of(key), []).append((key, row))
        stored: list[bytes] = []
        copied = 0
        for chunks in by_group.values():
            copied += self._store_run(chunks, epoch, stored)
        return stored, copied * self._chunk_bytes, ""

    def _store_run(self, chunks: Sequence[tuple[bytes, int]], epoch: int, stored: list[bytes]) -> int:
        """Appends the keys that are in the well now to `stored`; how many chunks were copied for that."""
        deadline = time.monotonic() + STORE_S
        digests = b"".join(digest_of_key(key) for key, _ in chunks)
        at = copied = 0
        waits, parent = _pauses(), b""
        while at < len(chunks):
            upto = min(at + MAX_RESERVED, len(chunks))
            spill = self._client.reserve(parent, digests[32 * at : 32 * upto], epoch)
            if spill is None or not self._granted(spill, deadline):
                break
            filled, whole = self._fill(spill, chunks[at:upto])
            copied += filled
            if not whole:
                break
            # Behind the last lease of an answer with a reason, all were refused for it.
            last = max((number for number, lease in enumerate(spill.leases) if lease), default=-1)
            settled = last + 1 if spill.reason else upto - at
            stored += [key for key, _ in chunks[at : at + settled]]
            at += settled
            deadline = time.monotonic() + STORE_S if settled else deadline
            # A block keeps those before it in the arena. Where there is no room for both, it goes by itself.
            parent = b"" if spill.reason == "no_room" else digests[32 * (at - 1) : 32 * at]
            if spill.reason and (spill.reason != "no_room" or not self._wait(next(waits), deadline)):
                break
        return copied

    def _granted(self, spill: Spill, deadline: float) -> bool:
        for pause in _pauses():
            if spill.granted:
                return True
            if not self._wait(pause, deadline):
                self._client.abandon(spill, 0)
                return False
        return False

    def _wait(self, seconds: float, deadline: float) -> bool:
        """False: it is time to give up."""
        left = deadline - time.monotonic()
        return left > 0 and not self._hurried.wait(min(seconds, left))

    def _fill(self, spill: Spill, chunks: Sequence[tuple[bytes, int]]) -> tuple[int, bool]:
        """How many chunks were copied into the slots that were granted, and whether those are all."""
        assert self._rows is not None
        if spill.refs is None:
            return 0, False
        leased = [(lease, row) for lease, (_, row) in zip(spill.leases, chunks, strict=True) if lease]
        filled: list[int] = []
        try:
            with self._worker.copying() as hold:
                for (lease, row), ref in zip(leased, spill.refs.tolist(), strict=True):
                    hold.slot(spill.session, *ref[0]).bytes[:] = self._rows[row]
                    filled.append(lease)
        except IntegrityError:  # the session has ended, or the slab is none of ours any more
            pass
        finally:
            self._worker.filled(spill.session, filled, [lease for lease, _ in leased[len(filled) :]])
        return len(filled), len(filled) == len(leased)


def _started(count: int, name: str) -> ThreadPoolExecutor:
    """A pool all of whose threads run, so that it starts none later."""
    pool, all_run = ThreadPoolExecutor(count, name), threading.Barrier(count + 1)
    try:
        for _ in range(count):
            pool.submit(all_run.wait)
    except BaseException:
        all_run.abort()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    all_run.wait()
    return pool


def _pauses() -> Iterator[float]:
    wait, longest = _POLLS_S
    while True:
        yield wait
        wait = min(2 * wait, longest)
