"""A well in the same process, for libraries (`stepwell.open()`), tests and tools.

The hierarchy stays single-threaded behind one lock: calls run what they cause as far as it goes. What blocks is run
inline by default, so that all of it has happened when a call returns; for libraries it is run by threads of the well's
own, one of which also acts when time alone gives something to do, so that no caller waits for storage. What outlives
the process is what a disk has.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from stepwell.block.namespace import DEFAULT_TENANT
from stepwell.errors import BackendDown, ConfigError
from stepwell.events import Event, TierRecovered
from stepwell.hierarchy import audit
from stepwell.hierarchy.core import Callback, Limits, Options, System
from stepwell.hierarchy.hierarchy import Hierarchy
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.hierarchy.sessions.session import Member, Peer
from stepwell.io.clock import Clock, MonotonicClock
from stepwell.io.executor import Done, Job
from stepwell.io.memory import Memory, SystemMemory
from stepwell.io.paths import prepare_home
from stepwell.policies.decide import RecallMode
from stepwell.protocol.link import Link, Receiver
from stepwell.protocol.messages import FromEngine, FromWell, Hello, Message
from stepwell.tiers.disk.site import take
from stepwell.tiers.disk.tier import DiskTier
from stepwell.units import parse_amount, parse_size
from stepwell.vault.keyring import Keyring

KEYRING = "keyring"
DISK_THREADS, DISK_RESERVE = 4, "5%"
"""Threads that read a well's disk, as many as write it, and the share of its filesystem that is left free."""

RECOVER_S, DRAIN_S, JOBS_S = 10.0, 5.0, 2.0
"""Most seconds that a well with threads is waited for: until it knows what its disk has; when it is closed, until what
waits is written, and then until jobs under way have ended."""

log = logging.getLogger("stepwell")


class InlineExecutor:
    """Runs each job at once; its completion is delivered by the next pump."""

    def __init__(self) -> None:
        self.completions: deque[Callback] = deque()

    def submit(self, job: Job, done: Done) -> None:
        self.completions.append(partial(done, _run(job)))


class JobThreads:
    """Runs jobs on `threads` threads; `ended` is called on them whenever there are completions for the next pump."""

    def __init__(self, threads: int) -> None:
        self.completions: deque[Callback] = deque()
        self.ended: Callback = lambda: None
        self._jobs: SimpleQueue[tuple[Job, Done] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"stepwell-local-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, done: Done) -> None:
        self._jobs.put((job, done))

    def close(self, seconds: float) -> bool:
        """Waits for the jobs that were submitted. False: one hangs, and is not waited for any longer."""
        for _ in self._threads:
            self._jobs.put(None)
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (task := self._jobs.get()) is not None:
            job, done = task
            self.completions.append(partial(done, _run(job)))
            del task, job, done  # an idle thread keeps nothing alive
            self.ended()


def _run(job: Job) -> BaseException | None:
    """Runs the job and returns what it raises: an executor hands every failure to its caller."""
    try:
        job()
    except Exception as error:  # noqa: BLE001 - the caller decides
        return error
    return None


class LocalWell:
    """A well behind a lock. `dial` is what engine-side classes take instead of a socket. With `threads`, which run its
    jobs, it has one more that pumps when jobs have ended and when it is time; the clock is then the system's."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        executor: InlineExecutor | None = None,
        lock: threading.RLock | None = None,
        *,
        threads: Sequence[JobThreads] = (),
    ) -> None:
        self.hierarchy = hierarchy
        self._executors = [*threads, *([executor] if executor is not None else ())]
        self._threads = threads
        self._lock = lock or threading.RLock()
        self._deliveries: deque[Callback] = deque()
        self._pumping = False
        self._closed = False
        self._moment: float | None = None  # when time alone gives something to do, as the keeper knows it
        self._wake = threading.Event()
        self._over = threading.Event()
        self._keeper = threading.Thread(target=self._keep_time, name="stepwell-local", daemon=True) if threads else None
        if self._keeper is not None:
            for each in threads:
                each.ended = self._wake.set
            self._keeper.start()

    def dial(self, hello: Hello, receiver: Receiver) -> Link:
        """Joins as a member of this process. Raises BackendDown after `close`."""
        link = _LocalLink(self, receiver)
        with self._lock:
            if self._closed:
                raise BackendDown("SW-505", what="the well is closed", why="it was closed", fix="open another")
            peer = Peer(os.getuid(), os.getpid(), watched=True, tenant=DEFAULT_TENANT)
            link.member = self.hierarchy.join(peer, hello, link)
            if link.member is None:
                link.sever()
        self.pump()
        return link

    def handle(self, member: Member, message: FromEngine) -> None:
        with self._lock:
            self.hierarchy.handle(member, message)
        self.pump()

    def leave(self, member: Member, *, exited: bool) -> None:
        """`exited`: the member promises that it copies no more, as if its process had ended."""
        with self._lock:
            (self.hierarchy.exited if exited else self.hierarchy.left)(member)
        self.pump()

    def later(self, delivery: Callback) -> None:
        self._deliveries.append(delivery)

    def pump(self) -> None:
        """Runs the hierarchy until it has nothing to do. Deliveries may call back in; they are queued, not nested."""
        with self._lock:
            if self._pumping:
                return
            self._pumping = True
            try:
                more = True
                while more:
                    more = self.hierarchy.turn()
                    for executor in self._executors:
                        while executor.completions:
                            executor.completions.popleft()()
                            more = True
                    while self._deliveries:
                        self._deliveries.popleft()()
                        more = True
            finally:
                self._pumping = False
            if self._keeper is not None and (moment := self.hierarchy.next_moment) != self._moment:
                self._moment = moment
                self._wake.set()

    def _keep_time(self) -> None:
        while not self._over.is_set():
            moment = self._moment
            self._wake.wait(None if moment is None else max(0.0, moment - time.monotonic()))
            self._wake.clear()
            self.pump()

    def stats(self) -> dict[str, int | float | str]:
        with self._lock:
            return self.hierarchy.stats()

    def check(self) -> None:
        """Raises IntegrityError unless all books balance."""
        with self._lock:
            audit.hierarchy(self.hierarchy)

    def close(self) -> None:
        """Ends all sessions and frees the shared memory. With threads, what waits to be written is written before, in
        DRAIN_S at most, and a job that hangs in the system keeps what it uses."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._threads and not self._end_threads():
            log.warning("stepwell: a job of the well in this process hangs, and is left behind with what it uses")
            return
        with self._lock:
            self.hierarchy.close()
        self.pump()

    def _end_threads(self) -> bool:
        """Writes what waits to be written and ends the threads. False: one hangs."""
        drained = threading.Event()
        with self._lock:
            self.hierarchy.drain(drained.set)
        self.pump()
        drained.wait(DRAIN_S)
        self._over.set()
        self._wake.set()
        deadline = time.monotonic() + JOBS_S
        ended = [threads.close(deadline - time.monotonic()) for threads in self._threads]
        if self._keeper is not None:
            self._keeper.join(max(0.0, deadline - time.monotonic()))
        return all(ended)

    def __enter__(self) -> LocalWell:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _LocalLink:
    def __init__(self, well: LocalWell, receiver: Receiver) -> None:
        self._well = well
        self._receiver = receiver
        self._ended = False
        self.member: Member | None = None

    def post(self, message: Message) -> None:
        if self.member is not None and not self._ended:
            self._well.handle(self.member, message)  # type: ignore[arg-type]

    def close(self) -> None:
        """In one process a closed link is a promise that its owner copies no more."""
        if self.member is not None and not self._ended:
            self._well.leave(self.member, exited=True)
        self.end()

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        copies = [os.dup(fd) for fd in fds]
        self._well.later(lambda: self._received(message, copies))

    def _received(self, message: Message, fds: list[int]) -> None:
        if not self._ended:
            self._receiver.received(message, fds)  # type: ignore[arg-type]
            return
        for fd in fds:
            os.close(fd)

    def sever(self) -> None:
        """The well ends the link, after what it has said."""
        self._well.later(self.end)

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._receiver.lost()


def open_well(
    host: str | int = "256MiB",
    *,
    home: Path | None = None,
    clock: Clock | None = None,
    memory: Memory | None = None,
    recall: RecallMode = RecallMode.AUTO,
) -> LocalWell:
    """A well in this process with `host` bytes of shared memory, whose jobs are run inline. Its keys are those of
    `home`, or made up for this process where no home is given. `recall`: whether blocks are recalled that may be
    cheaper to compute, as the setting of this name. Raises StepwellError for sizes and homes that cannot be used."""
    executor = InlineExecutor()
    keyring = Keyring.open(home / KEYRING) if home is not None else Keyring.ephemeral()
    hierarchy = Hierarchy(
        Limits(parse_size(host)),
        System(clock or MonotonicClock(), executor, memory or SystemMemory()),
        Sealing(keyring, sealed=True, wall=time.time),
        Options(recall),
        well="in-process",
    )
    return LocalWell(hierarchy, executor)


def open_threaded(
    host: str | int, *, home: Path | None = None, disk: Path | None = None, disk_size: str | int = "10GiB"
) -> LocalWell:
    """The same with threads, for libraries. `disk`: a directory of this well alone, for at most `disk_size` of blocks
    (bytes, or a per cent of its filesystem); they outlive the process, for the next well with the same `home`, which
    has their keys. Waits for what an earlier life left there, RECOVER_S at most. Raises StepwellError for sizes and
    directories that cannot be used."""
    host_bytes, size = parse_size(host), parse_amount(disk_size)
    if disk is not None and home is None:
        raise ConfigError(
            "SW-102",
            what="a disk without a home",
            why="what is written there is sealed, and its keys would be gone with this process",
            fix="give a home, a directory of your own that keeps the keys",
        )
    if home is not None:
        prepare_home(home)
    keyring = Keyring.open(home / KEYRING) if home is not None else Keyring.ephemeral()
    sealing, clock = Sealing(keyring, sealed=True, wall=time.time), MonotonicClock()
    site = take(disk, size, parse_amount(DISK_RESERVE)) if disk is not None else None
    threads = [JobThreads(1)]
    tier: DiskTier | None = None
    if site is not None:
        threads += [JobThreads(DISK_THREADS), JobThreads(DISK_THREADS)]
        tier = DiskTier([site], threads[1], clock, time.time, sealing, readers=threads[2])
    recovered = threading.Event()

    def hear(event: Event) -> None:
        if isinstance(event, TierRecovered):
            recovered.set()

    hierarchy = Hierarchy(
        Limits(host_bytes, readers=2 * DISK_THREADS),
        System(clock, threads[0], SystemMemory()),
        sealing,
        well="in-process",
        tiers=() if tier is None else (tier,),
        sink=hear,
    )
    well = LocalWell(hierarchy, threads=threads)
    if tier is not None:
        hierarchy.recover()
        well.pump()
        recovered.wait(RECOVER_S)
    return well


__all__ = ["FromWell", "InlineExecutor", "JobThreads", "LocalWell", "open_threaded", "open_well"]
