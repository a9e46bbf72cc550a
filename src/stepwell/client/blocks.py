"""Whole blocks of KV, put and got by calls that block: what a library or a simple engine uses of a well.

    with stepwell.open(model, host="1GiB") as cache:
        cache.put(tokens, blocks)               # as many of the prefix's blocks as the arrays are
        found = cache.get(tokens, buffers)      # found.blocks leading buffers hold what was put
        cache.contains(tokens).blocks

A block is found by the tokens before it and its own, as in an engine. Every call has a time limit. What keeps the well
from serving, whatever it is, makes blocks missing and raises nothing: the answers say why. What the caller has written
wrongly raises ConfigError before anything happens.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count

import numpy as np

from stepwell.block.facts import digest_of, facts_text
from stepwell.block.namespace import LOADED_FROM_FILES
from stepwell.client.identity import EngineIdentity, WorkerIdentity
from stepwell.client.kv_model import Array, Blocks, KvModel, Tokens, unusable
from stepwell.client.questions import FOR_ROOM, PrefixQuestion, Spill
from stepwell.client.scheduler import MAX_RESERVED, SchedulerClient
from stepwell.client.worker import WorkerClient
from stepwell.errors import ConfigError, IntegrityError, StepwellError
from stepwell.io.memory import Bytes
from stepwell.protocol.link import Dial

PUT_S = GET_S = CONTAINS_S = 2.0
"""Seconds that a call may take if nothing else is said; the copy of one block comes on top."""

OPEN_S = 5.0
"""Seconds until the well of a new client has to be there, or the client goes on without."""

ROOM_S = 0.2
"""Seconds that `put` tries again where nothing is taken: memory comes over from other models' blocks within this."""

CLOSE_S = 1.0
"""Seconds that `close` waits for calls of other threads, and for answers that came too late."""

_LATE, _NO_SESSION, _NOT_VERIFIED, _REFUSED = "time_limit", "no_session", "not_verified", "refused"
_POLLS_S = (0.0002, 0.005)  # between two looks at what the link's thread has been told: doubled from the first
_ROOM_POLLS_S = (0.005, 0.05)

log = logging.getLogger("stepwell")


@dataclass(frozen=True, slots=True)
class BlocksPresent:
    """`blocks` leading blocks of `asked` can be read now. `reason` says why not more, "" if it is all of them."""

    blocks: int
    asked: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """`blocks` leading blocks of `asked` are in the cache, whether they were copied by this call or were there before.
    `reason` says why not more, "" if it is all of them."""

    blocks: int
    asked: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class BlocksRead:
    """`blocks` leading buffers of `asked` hold what was put, verified; what is in the others means nothing. `reason`
    says why not more, "" if it is all of them."""

    blocks: int
    asked: int
    reason: str = ""


class BlockClient:
    """One model's blocks in one well, of one tenant: the one that this process's user or the well's socket has. Any
    number of threads may call it at the same time; a forked child may not. `find` is how the well is reached.

    Reasons are the well's own for misses (never_seen, evicted, pins, tier_down, well_lost ...), and besides:
    time_limit; no_session: no well serves at the moment; not_verified: what was read had been given to another block
    meanwhile; refused: there is no room, or the block is not worth it.

    Without a well it keeps trying to join one, in the background; with `threaded=False` (a well in this process) it
    does not. `trouble` is told of what keeps it from a well, once per cause; if it is not given, that is logged."""

    def __init__(
        self,
        model: KvModel,
        find: Callable[[], Dial],
        *,
        timeout: float = OPEN_S,
        threaded: bool = True,
        trouble: Callable[[StepwellError], None] | None = None,
        closed: Callable[[], None] = lambda: None,
    ) -> None:
        """Waits up to `timeout` seconds for the well. `closed` is called when the client has been closed. Raises the
        error that only a person can end: settings, shapes, permissions, an unsuited system."""
        deadline = _deadline(timeout)
        self.model = model
        self._told = trouble or _log
        self._after = closed
        self._last: StepwellError | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._calls = 0  # under way
        self._late: list[Spill] = []  # given up before they were answered
        self._orders = count(1)
        engine, size = secrets.token_hex(8), model.block_bytes
        weights, layout = model.weights_digest, digest_of(model.layout_facts)
        self._worker = WorkerClient(
            WorkerIdentity(engine, 0, 1, size, layout), find, trouble=self._trouble, threaded=threaded
        )
        try:
            self._client = SchedulerClient(
                EngineIdentity(
                    engine,
                    1,
                    size,
                    model.block_tokens,
                    layout,
                    digest_of(model.model_facts),
                    model.name,
                    facts=facts_text(model.model_facts | model.layout_facts),
                ),
                lambda: weights,
                find,
                trouble=self._trouble,
                threaded=threaded,
            )
        except BaseException:
            self._worker.close()
            raise
        try:
            self._join(deadline)
        except BaseException:
            self.close()
            raise

    def _join(self, deadline: float) -> None:
        for _ in _polls(deadline):
            if self._client.live:
                return
            if self._last is not None and self._last.code[3] not in "25":
                raise self._last

    def _trouble(self, error: StepwellError) -> None:
        self._last = error
        self._told(error)

    @property
    def live(self) -> bool:
        """A well serves this client at the moment."""
        return self._client.live

    # blocks -----------------------------------------------------------------------------------------------------------

    def put(
        self, tokens: Tokens, blocks: Blocks, *, first: int = 0, salt: str | None = None, timeout: float = PUT_S
    ) -> BlocksStored:
        """Stores copies of `blocks`, which are the prefix's blocks from number `first` on; what is there already is not
        copied again. `tokens`: all of the prefix, from its beginning; a last block that is not full is left out.
        `salt`: prefixes of different salts never meet. Raises ConfigError SW-136 and SW-137."""
        with self._call(timeout) as deadline:
            digests = self.model.digests(tokens, salt)
            rows = self.model.rows("blocks", blocks, len(digests) // 32, first, writable=False)
            stored, more, reason = 0, 1, _REFUSED
            while more and reason == _REFUSED and stored < len(rows):  # room comes piece by piece
                for _ in _polls(min(deadline, time.monotonic() + ROOM_S), _ROOM_POLLS_S):
                    more, reason = self._store(digests, first + stored, rows[stored:], deadline)
                    if more or reason != _REFUSED:
                        break
                stored += more
            return BlocksStored(stored, len(rows), reason if stored < len(rows) else "")

    def get(
        self, tokens: Tokens, buffers: Blocks, *, first: int = 0, salt: str | None = None, timeout: float = GET_S
    ) -> BlocksRead:
        """Copies the prefix's blocks from number `first` on into `buffers`, as many as are there and come in time: from
        a tier below host memory they have to be brought up. Arguments and errors are those of `put`."""
        with self._call(timeout) as deadline:
            digests = self.model.digests(tokens, salt)
            rows = self.model.rows("buffers", buffers, len(digests) // 32, first, writable=True)
            wanted, read, reason = digests[32 * first : 32 * (first + len(rows))], 0, ""
            while read < len(rows):
                ask, blocks, reason = self._ask(wanted[32 * read :], deadline)
                if ask is None:
                    break
                copied, failed = self._copy_out(ask, blocks, wanted[32 * read :], rows[read : read + blocks], deadline)
                read, reason = read + copied, failed or reason
                if reason not in FOR_ROOM:
                    break
            return BlocksRead(read, len(rows), reason if read < len(rows) else "")

    def contains(self, tokens: Tokens, *, salt: str | None = None, timeout: float = CONTAINS_S) -> BlocksPresent:
        """How many of the prefix's blocks a `get` at this moment would read. What lies in a tier below host memory is
        brought up for that. Arguments and errors are those of `put`."""
        with self._call(timeout) as deadline:
            digests = self.model.digests(tokens, salt)
            there, reason = self._present(digests, deadline)
            asked = len(digests) // 32
            return BlocksPresent(there, asked, reason if there < asked else "")

    def close(self) -> None:
        """Ends the session; no call begins any more. Calls of other threads are waited for, CLOSE_S at most: what they
        are copying then counts as missing, and its slots stay reserved until this process ends. Threads and descriptors
        of the client end in a moment. Idempotent."""
        if os.getpid() != self._process:
            return  # all of it is the parent's
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            for _ in _polls(time.monotonic() + CLOSE_S):
                if not self._calls and all(spill.granted for spill in self._late):
                    break
            for spill in self._late:
                self._client.abandon(spill, 0)
            # The worker first: what it has acknowledged is known before the session ends, and so nothing is held.
            self._worker.close()
            self._client.close()
        finally:
            self._after()

    def __enter__(self) -> BlockClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _call(self, timeout: float) -> Iterator[float]:
        """Around each call: the moment at which it has to end. Raises ConfigError SW-136 and SW-137."""
        deadline = _deadline(timeout)
        forked = os.getpid() != self._process
        with nullcontext() if forked else self._lock:  # which the parent may have held
            if forked or self._closed:
                raise ConfigError(
                    "SW-137",
                    what="a cache that serves no more was called",
                    why="it was opened before this process was forked" if forked else "it was closed",
                    fix="open another one in this process with stepwell.open()",
                )
            self._calls += 1
        try:
            yield deadline
        finally:
            with self._lock:
                self._calls -= 1

    # asking -----------------------------------------------------------------------------------------------------------

    def _ask(self, digests: bytes, deadline: float) -> tuple[PrefixQuestion | None, int, str]:
        """The leading run of these blocks that is there, pinned until the caller recalls or releases the ask, and why
        it ends. None: there is none. A longer run may follow where one ends for room: no request may pin all of host
        memory at once."""
        ask = self._client.ask(digests, LOADED_FROM_FILES, next(self._orders), recall="always")
        if ask is None:
            return None, 0, _NO_SESSION
        blocks = 0
        try:
            self._client.settle(ask, max(0.0, deadline - time.monotonic()))
            blocks = self._client.offer(ask)
        finally:
            if not blocks:
                self._client.release(ask)
        return (ask if blocks else None), blocks, (ask.reason if ask.final else _LATE)

    def _present(self, digests: bytes, deadline: float) -> tuple[int, str]:
        """How many leading blocks there are, and why not more."""
        there, reason = 0, ""
        while 32 * there < len(digests):
            ask, blocks, reason = self._ask(digests[32 * there :], deadline)
            if ask is None:
                break
            self._client.release(ask)
            there += blocks
            if reason not in FOR_ROOM:
                break
        return there, reason

    # copying ----------------------------------------------------------------------------------------------------------

    def _copy_out(
        self, ask: PrefixQuestion, blocks: int, digests: bytes, rows: list[Array], deadline: float
    ) -> tuple[int, str]:
        """How many leading blocks of the run were copied and then verified to be what was leased; why not all. One that
        is not is dropped, or it would be offered for ever."""
        transfer, refs = self._client.recall(ask, 0, blocks)
        copied = 0
        try:
            with self._worker.copying() as hold:
                for row, ref in zip(rows, refs.tolist(), strict=True):
                    if time.monotonic() > deadline:
                        return copied, _LATE
                    _bytes(row)[:] = hold.slot(ask.session, *ref[0]).bytes
                    self._worker.verify(ask.session, *ref[0])
                    copied += 1
        except IntegrityError:
            self._client.forget(ask.session, digests[32 * copied : 32 * copied + 32], LOADED_FROM_FILES)
            return copied, _NOT_VERIFIED
        finally:
            self._worker.recalled(ask.session, [transfer])
        return copied, ""

    def _store(self, digests: bytes, first: int, rows: list[Array], deadline: float) -> tuple[int, str]:
        """How many leading ones of these blocks, from number `first` of the prefix on, are in the cache now; why not
        all."""
        end, stored, reason = first + len(rows), 0, ""
        for at in range(first, end, MAX_RESERVED):
            copied, reason = self._fill(digests, at, rows[at - first : at - first + MAX_RESERVED], deadline)
            stored += copied if first + stored == at else 0
            if reason not in ("", _REFUSED):
                return stored, reason
        if stored < len(rows):  # what was refused may be there
            there, reason = self._present(digests[32 * (first + stored) : 32 * end], deadline)
            stored += there
        return stored, _REFUSED if reason in ("never_seen", "evicted") else reason

    def _fill(self, digests: bytes, at: int, rows: list[Array], deadline: float) -> tuple[int, str]:
        """Stores what the well takes of these blocks, the first of which is number `at` of the prefix: how many leading
        ones were copied; why not all."""
        parent, mine = digests[32 * (at - 1) : 32 * at] if at else b"", digests[32 * at : 32 * (at + len(rows))]
        spill = self._client.reserve(parent, mine, LOADED_FROM_FILES, at)
        if spill is None:
            return 0, _NO_SESSION
        granted = False
        try:
            granted = any(spill.granted for _ in _polls(deadline))
        finally:
            if not granted:
                self._client.abandon(spill, 0)
                with self._lock:
                    self._late = [late for late in (*self._late, spill) if not late.granted]
        if not granted:
            return 0, _LATE
        if spill.refs is None:
            return 0, "well_lost"
        return self._copy_in(spill, rows, deadline)

    def _copy_in(self, spill: Spill, rows: list[Array], deadline: float) -> tuple[int, str]:
        assert spill.refs is not None
        leased = [(lease, row) for lease, row in zip(spill.leases, rows, strict=True) if lease]
        filled: list[int] = []
        reason = "" if len(leased) == len(rows) else _REFUSED
        try:
            with self._worker.copying() as hold:
                for (lease, row), ref in zip(leased, spill.refs.tolist(), strict=True):
                    if time.monotonic() > deadline:
                        reason = _LATE
                        break
                    hold.slot(spill.session, *ref[0]).bytes[:] = _bytes(row)
                    filled.append(lease)
        except IntegrityError:  # the session has ended, or the slab is none of ours any more
            reason = _NOT_VERIFIED
        finally:
            self._worker.filled(spill.session, filled, [lease for lease, _ in leased[len(filled) :]])
        leading = next((n for n, lease in enumerate(spill.leases) if not lease), len(rows))
        return min(leading, len(filled)), reason


def _bytes(row: Array) -> Bytes:
    """A contiguous array's bytes, in place."""
    return row.reshape(-1).view(np.uint8)


def _deadline(timeout: float) -> float:
    """The moment in so many seconds. Raises ConfigError SW-136."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
        raise unusable(f"timeout = {timeout!r}", "it must be 0 or more seconds", "give a number of seconds")
    return time.monotonic() + min(timeout, threading.TIMEOUT_MAX / 2)


def _polls(deadline: float, waits_s: tuple[float, float] = _POLLS_S) -> Iterator[None]:
    """A look at once, and again until the deadline, ever more slowly."""
    wait, longest = waits_s
    while True:
        yield
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(wait, left))
        wait = min(2 * wait, longest)


def _log(error: StepwellError) -> None:
    log.warning("stepwell: no blocks for now: %s", error)
