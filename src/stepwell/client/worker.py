"""A worker's member: maps the arena's slabs off the request path and hands out slots to copy from and to.

Everything about a slot is checked here: whether it was leased to the present session, whether its slab is mapped, and
whether its generation is still the one that was leased, before and after a copy. Slabs of a lost session are unmapped
when running copies have ended; only then is the old session acknowledged to the well. What a plan says of a session
that has ended is neither copied nor acknowledged: numbers of slabs, slots and leases mean nothing beyond it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stepwell.client.membership import Membership, Trouble
from stepwell.errors import CapacityError, IntegrityError, StepwellError, as_error
from stepwell.io.memory import PIECE, Bytes, Mapping
from stepwell.protocol import messages as m
from stepwell.protocol.link import Dial


class _Slab:
    def __init__(self, shared: m.SlabShared, shard_bytes: int, mapping: Mapping) -> None:
        self.mapping = mapping
        self.generations: npt.NDArray[np.uint64] = mapping.bytes[: 8 * shared.slots].view(np.uint64)
        end = shared.offset + shared.slots * shared.stride
        whole = mapping.bytes[shared.offset : end].reshape(shared.slots, shared.stride)
        self.slots: Bytes = whole[:, :shard_bytes]

    def close(self) -> None:
        del self.generations, self.slots
        self.mapping.close()


class Slot(NamedTuple):
    """Slot `number` of a slab: row `number` of `slots`, (slots, shard_bytes) of shared memory."""

    slots: Bytes
    number: int

    @property
    def bytes(self) -> Bytes:
        row: Bytes = self.slots[self.number]
        return row


@dataclass(frozen=True, slots=True)
class Identity:
    """What a worker says about itself."""

    engine: str
    rank: int
    world: int
    shard_bytes: int
    layout: bytes


class WorkerClient:
    """One per rank. `copying()` must surround every use of a slot."""

    def __init__(
        self,
        identity: Identity,
        find: Callable[[], Dial],
        *,
        trouble: Trouble,
        wishes: dict[str, str | int | float] | None = None,
        threaded: bool = True,
        prepare: Any = None,
    ) -> None:
        self._identity = identity
        self._wishes = wishes or {}
        self._slabs: dict[tuple[int, int], _Slab] = {}  # by session and number
        self._session = 0
        self._left: list[int] = []  # sessions to acknowledge with the next hello
        self._copying = 0
        self._idle = threading.Condition()
        self._todo: SimpleQueue[Callable[[], None] | None] | None = SimpleQueue() if threaded else None
        if self._todo is not None:
            threading.Thread(target=self._map_all, args=(self._todo,), name="stepwell-map", daemon=True).start()
        self.membership = Membership(self._hello, find, self, trouble)
        self.membership.begin(threaded=threaded)

    # copying ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def copying(self) -> Iterator[Any]:
        """While this is held no slab is unmapped."""
        with self._idle:
            self._copying += 1
        try:
            yield self
        finally:
            with self._idle:
                self._copying -= 1
                self._idle.notify_all()

    def slot(self, session: int, slab: int, slot: int, generation: int) -> Slot:
        """A leased slot. Raises IntegrityError when the lease no longer holds."""
        self.verify(session, slab, slot, generation)
        return Slot(self._slabs[session, slab].slots, slot)

    def verify(self, session: int, slab: int, slot: int, generation: int) -> None:
        """Raises IntegrityError unless the session goes on, the slot is mapped and still has this generation. Readers
        call it after their copy: then what they copied is what the well had leased."""
        known = self._slabs.get((session, slab)) if session == self._session else None
        if known is None or int(known.generations[slot]) != generation:
            raise IntegrityError(
                "SW-302",
                what="a slot's content changed",
                why="its generation is another one now",
                fix="nothing needed, the block is recomputed",
            )

    def filled(self, session: int, leases: Sequence[int], dropped: Sequence[int]) -> None:
        if leases or dropped:
            self._post(session, m.Filled(list(leases), list(dropped)))

    def recalled(self, session: int, transfers: Sequence[int]) -> None:
        if transfers:
            self._post(session, m.Recalled(list(transfers)))

    def _post(self, session: int, message: m.Message) -> None:
        outbox = self.membership.outbox
        if outbox is not None and session == self._session:
            outbox.post(message)

    @property
    def mapped(self) -> int:
        """Slabs ready for copies."""
        return len(self._slabs)

    def close(self) -> None:
        self.membership.close()
        if self._todo is not None:
            self._todo.put(None)

    # what the link's thread calls -------------------------------------------------------------------------------------

    def _hello(self) -> m.Hello | None:
        with self._idle:
            if self._left and self._copying:
                return None  # the old session's copies are still running: it cannot be acknowledged yet
        i = self._identity
        return m.Hello(
            m.PROTOCOL,
            "worker",
            i.engine,
            i.rank,
            i.world,
            i.shard_bytes,
            i.layout,
            wishes=self._wishes,
            acknowledges=list(self._left),
        )

    def received(self, message: m.FromWell, fds: Sequence[int]) -> None:
        match message:
            case m.SlabShared():
                session = self._session
                self._do(lambda: self._map(message, list(fds), session))
            case m.SlabRetired(slab=number):
                retired = (self._session, number)
                self._do(lambda: self._unmap(lambda key: key == retired))
            case m.Welcome(session=session):
                self._session = session
                self._left.clear()
            case m.Ready():
                self.membership.settled()
            case m.Refused(code=code, what=what, why=why, fix=fix):
                self.membership.trouble(as_error(code, what, why, fix))
            case _:
                pass

    def lost(self) -> None:
        if self._session:
            self._left.append(self._session)
        self._session = 0
        self._do(lambda: self._unmap(lambda key: key[0] != self._session))

    # mapping ----------------------------------------------------------------------------------------------------------

    def _do(self, job: Callable[[], None]) -> None:
        if self._todo is None:
            job()
        else:
            self._todo.put(job)

    @staticmethod
    def _map_all(todo: SimpleQueue[Callable[[], None] | None]) -> None:
        while (job := todo.get()) is not None:
            job()

    def _map(self, shared: m.SlabShared, fds: list[int], session: int) -> None:
        """Maps and prefaults a slab (an unpopulated mapping copies at a fifth of the speed), then reports it."""
        if not fds:
            return
        try:
            if session != self._session:
                return
            mapping = Mapping(fds[0], shared.nbytes)
            for start in range(0, shared.nbytes, PIECE):
                mapping.populate(start, min(PIECE, shared.nbytes - start), write=True)
        except (StepwellError, OSError, ValueError) as error:
            self._unmappable(error)
            return  # never reported as mapped, so never leased to us
        finally:
            for fd in fds:
                os.close(fd)
        with self._idle:
            if session != self._session:
                mapping.close()
                return
            self._slabs[session, shared.slab] = _Slab(shared, self._identity.shard_bytes, mapping)
        self._post(session, m.Mapped(shared.slab))

    def _unmappable(self, error: Exception) -> None:
        """Blocks in this slab are misses for the whole engine: somebody should know."""
        cause = error if isinstance(error, StepwellError) else None
        self.membership.trouble(
            cause
            or CapacityError(
                "SW-202",
                what="a slab of the arena could not be mapped in a worker",
                why=str(error),
                fix="raise the worker's limits on memory and open files",
            )
        )

    def _unmap(self, gone: Callable[[tuple[int, int]], bool]) -> None:
        with self._idle:
            self._idle.wait_for(lambda: self._copying == 0)
            for key in [key for key in self._slabs if gone(key)]:
                self._slabs.pop(key).close()
