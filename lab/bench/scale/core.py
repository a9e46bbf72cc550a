"""A well's state machine alone, on one thread, whose processor time is taken while it works and not while others do.

Messages go in and out as values: sockets and encoding are not in it. Jobs, which threads of a well do, are done at once
and left out of the account. One engine without a model has its session here; what it says costs nothing.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from stepwell.block.namespace import DEFAULT_TENANT
from stepwell.hierarchy.core import Callback, Limits, System
from stepwell.hierarchy.hierarchy import Hierarchy
from stepwell.hierarchy.local import DISK_THREADS, InlineExecutor
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.hierarchy.sessions.session import Member, Peer
from stepwell.io.clock import MonotonicClock
from stepwell.io.executor import Done, Job
from stepwell.io.memory import SystemMemory
from stepwell.policies.costs.prefill import pairs
from stepwell.protocol import messages as m
from stepwell.tiers.disk.site import take
from stepwell.tiers.disk.tier import DiskTier
from stepwell.units import parse_amount
from stepwell.vault.keyring import Keyring

SHARD_BYTES = 4096
PATIENCE_S = 60.0
GC_OBJECTS = 5000
"""Young objects that a busy loop lets come together."""

_STEP_TOKENS, _TOKEN_S, _COPY_S = 2048, 25e-6, 2e-10

Kind = TypeVar("Kind", bound=m.Message)


class _Aside(InlineExecutor):
    """Does jobs at once. `spent_s`: the processor time that they took."""

    def __init__(self) -> None:
        super().__init__()
        self.spent_s = 0.0

    def submit(self, job: Job, done: Done) -> None:
        began = time.thread_time()
        super().submit(job, done)
        self.spent_s += time.thread_time() - began


class _Inbox:
    """One member's end of its connection."""

    def __init__(self) -> None:
        self.messages: list[m.Message] = []
        self.severed = False

    def send(self, message: m.Message, fds: tuple[int, ...] = ()) -> None:
        self.messages.append(message)

    def sever(self) -> None:
        self.severed = True

    def take(self, kind: type[Kind]) -> list[Kind]:
        """All of this kind that came since the last call; others are dropped."""
        taken, self.messages = [each for each in self.messages if isinstance(each, kind)], []
        return taken


class Core(ExitStack):
    """A hierarchy with `host_bytes` of memory, a disk in `folder` if one is given, and an engine with blocks of
    `block_tokens`, whose speed the well has learned."""

    def __init__(self, host_bytes: int, block_tokens: int = 128, folder: Path | None = None) -> None:
        super().__init__()
        self.block_tokens = block_tokens
        self._spent_s = 0.0
        self._jobs = _Aside()
        clock = MonotonicClock()
        sealing = Sealing(Keyring.ephemeral(), sealed=True, wall=time.time)
        tiers = []
        if folder is not None:
            site = take(folder, parse_amount("8GiB"), parse_amount("1%"))
            tiers = [DiskTier([site], self._jobs, clock, time.time, sealing)]
        limits = Limits(host_bytes, readers=2 * DISK_THREADS)
        system = System(clock, self._jobs, SystemMemory())
        self.hierarchy = Hierarchy(limits, system, sealing, well="bench", tiers=tiers)
        self.callback(self.hierarchy.close)
        if tiers:
            self.hierarchy.recover()
        self._scheduler, self._heard = self._join("scheduler")
        self._worker, self._shared = self._join("worker")
        self.until(lambda: bool(self._heard.take(m.Ready)))
        self._map()
        steps = [(n, pairs(n, n * k), n * _TOKEN_S) for n in (_STEP_TOKENS // 2, _STEP_TOKENS) for k in range(8)]
        copies = [(n << 20, 1e-4 + (n << 20) * _COPY_S) for n in range(1, 33)]
        self.tell(m.Timings(steps, copies))

    def _join(self, role: str) -> tuple[Member, _Inbox]:
        inbox, peer = _Inbox(), Peer(0, 0, True, DEFAULT_TENANT)
        digest = bytes(32)
        hello = m.Hello(
            m.PROTOCOL, role, "bench", 0, 1, SHARD_BYTES, digest, digest, digest, self.block_tokens
        )  # fmt: skip
        member = self.hierarchy.join(peer, hello, inbox)
        assert member is not None, inbox.messages
        return member, inbox

    def _map(self) -> None:
        for slab in self._shared.take(m.SlabShared):
            self.hierarchy.handle(self._worker, m.Mapped(slab.slab))

    @property
    def spent_s(self) -> float:
        """Processor seconds of the well's thread so far."""
        return self._spent_s - self._jobs.spent_s

    def _work(self, began: float) -> None:
        """All that can be done now; its thread has worked since `began`. Jobs end when there is nothing else to do."""
        while self.hierarchy.turn() or self._jobs.completions:
            if not self.hierarchy.turn():
                for _ in range(len(self._jobs.completions)):
                    self._jobs.completions.popleft()()
        if gc.get_count()[0] > GC_OBJECTS:
            gc.collect(0)
        self._spent_s += time.thread_time() - began

    def _said(self, member: Member, message: m.FromEngine) -> None:
        began = time.thread_time()
        self.hierarchy.handle(member, message)
        self._work(began)

    def tell(self, message: m.FromEngine) -> None:
        """The scheduler says this, and what follows from it at once is done."""
        self._said(self._scheduler, message)

    def until(self, happened: Callable[[], bool]) -> None:
        """Works until this is so. Raises TimeoutError."""
        deadline = time.monotonic() + PATIENCE_S
        while not happened():
            time.sleep(1e-3)
            self._work(time.thread_time())
            if time.monotonic() > deadline:
                raise TimeoutError("the well does not answer")

    def reserve(self, number: int, digests: bytes, parent: bytes = b"") -> m.Granted:
        self._map()
        self.tell(m.Reserve(number, 0, parent, digests))
        granted = self._heard.take(m.Granted)
        while not granted:
            self._map()
            self._work(time.thread_time())
            granted = self._heard.take(m.Granted)
        return granted[0]

    def fill(self, leases: list[int]) -> None:
        self._said(self._worker, m.Filled(leases, []))

    def ask(self, number: int, digests: bytes) -> int:
        """Blocks that were found."""
        found: list[m.Found] = []

        def answered() -> bool:
            found.extend(self._heard.take(m.Found))
            return bool(found) and not found[-1].more

        self.tell(m.Ask(number, 0, number, digests, len(digests) // 32 * self.block_tokens))
        self.until(answered)
        return sum(len(each.slots) for each in found) // m.SLOT_REF.itemsize

    def release(self, number: int) -> None:
        self.tell(m.Release(number))

    def recall(self, number: int, blocks: int) -> None:
        """Takes the answer's blocks, as copies that end at once."""
        self.tell(m.Recall(number, number, 0, blocks, waited_s=1e-3))
        self._said(self._worker, m.Recalled([number]))

    def written(self) -> None:
        """Works until nothing waits to be written."""
        self.until(lambda: all(level.writes.idle for level in self.hierarchy.stack.levels))

    def has(self, digest: bytes) -> bool:
        """This block is in host memory."""
        return self._scheduler.session.origins(0)[0].name(digest) in self.hierarchy.index

    def spent(self, work: Callback) -> float:
        """Processor seconds of the well's thread for this. Garbage is collected as a well's loop does it."""
        before = self.spent_s
        gc.disable()
        try:
            work()
        finally:
            gc.enable()
        return self.spent_s - before
