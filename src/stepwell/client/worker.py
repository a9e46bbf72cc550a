"""A worker's member: maps the arena's slabs off the request path and hands out slots to copy from and to.

Everything about a slot is checked here: whether it was leased to the present session, whether its slab is mapped, and
whether its generation is still the one that was leased, before and after a copy. Slabs of a lost session are unmapped
when the copies that hold them have ended, and only when nothing of them is left in this process does it join again and
acknowledge that session to the well. What a plan says of a session that has ended is neither copied nor acknowledged:
numbers of slabs, slots and leases mean nothing beyond it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue

from stepwell.client.identity import WorkerIdentity
from stepwell.client.membership import Membership, Trouble
from stepwell.client.slabs import Hold, Key, Prepare, Slabs, Slot
from stepwell.client.streams import Stream, StreamLimits, Streams
from stepwell.errors import as_error
from stepwell.protocol import messages as m
from stepwell.protocol.link import Dial


class WorkerClient:
    """One per rank. A `hold` must surround every use of a slot; `prepare` makes slabs known to a driver before they are
    reported as mapped.

    Threads: the link's takes messages and never waits; the mapping thread maps, prepares, undoes and unmaps one slab
    after the other (without one, whoever causes it does); holds and acknowledgements are any thread's."""

    def __init__(
        self,
        identity: WorkerIdentity,
        find: Callable[[], Dial],
        *,
        trouble: Trouble,
        options: dict[str, str | int | float] | None = None,
        prepare: Prepare | None = None,
        clock: Callable[[], float] = time.monotonic,
        threaded: bool = True,
    ) -> None:
        self._identity = identity
        self._options = options or {}
        self._session = 0
        self._left: list[int] = []  # sessions to acknowledge with the next hello
        self._closed = False
        self.stirred: Callable[[], None] = lambda: None
        """Called by the link's thread, which must not wait, when something of a stream has come, or all are over."""
        self._pins = prepare is not None  # a driver keeps pages in memory whatever the well does to them
        self._slabs = Slabs(
            identity.shard_bytes,
            do=lambda job: self._do(job),
            mapped=self._mapped,
            gone=self._gone,
            trouble=lambda error: self.membership.trouble(error),
            prepare=prepare,
        )
        self._streams = Streams(identity.shards, clock)
        self._todo: SimpleQueue[Callable[[], None]] | None = SimpleQueue() if threaded else None
        if self._todo is not None:
            threading.Thread(target=self._map_all, args=(self._todo,), name="stepwell-map", daemon=True).start()
        self.membership = Membership(self._hello, find, self, trouble)
        self.membership.begin(threaded=threaded)

    # copying ----------------------------------------------------------------------------------------------------------

    def hold(self) -> Hold:
        """For one copy: the slabs of the slots that it gives out stay mapped until it is closed."""
        return self._slabs.hold()

    @contextmanager
    def copying(self) -> Iterator[Hold]:
        """A hold for a copy that ends here."""
        hold = self.hold()
        try:
            yield hold
        finally:
            hold.close()

    def verify(self, session: int, slab: int, slot: int, generation: int) -> None:
        """Raises IntegrityError unless the session goes on, the slot is mapped and still has this generation. Readers
        call it after their copy: then what they copied is what the well had leased."""
        self._slabs.verify((session, slab), slot, generation)

    def is_renewed(self, session: int, slab: int, slot: int, generation: int) -> bool:
        """The slot has other content than what was leased, as far as this member can tell."""
        return self._slabs.is_renewed((session, slab), slot, generation)

    def filled(self, session: int, leases: Sequence[int], dropped: Sequence[int]) -> None:
        for at in range(0, max(len(leases), len(dropped)), m.MAX_LISTED):
            some = slice(at, at + m.MAX_LISTED)
            self._post(session, m.Filled(list(leases[some]), list(dropped[some])))

    def recalled(self, session: int, transfers: Sequence[int]) -> None:
        for at in range(0, len(transfers), m.MAX_LISTED):
            self._post(session, m.Recalled(list(transfers[at : at + m.MAX_LISTED])))

    def stream(self, session: int, transfer: int, limits: StreamLimits) -> Stream:
        """The blocks of a streamed transfer as they land. Of a session that has ended none come."""
        return self._streams.open(session, transfer, limits)

    def copied(self, session: int, transfer: int, blocks: int) -> None:
        """So many leading blocks of a streamed transfer are copied; `recalled` ends it."""
        self._post(session, m.BlocksCopied(transfer, blocks))

    def _post(self, session: int, message: m.Message) -> None:
        outbox = self.membership.outbox
        if outbox is not None and session == self._session:
            outbox.post(message)

    @property
    def mapped(self) -> int:
        """Slabs that are mapped here."""
        return self._slabs.mapped

    @property
    def leaked(self) -> int:
        """Slabs that a driver does not give back: they stay mapped until this process ends."""
        return len(self._slabs.leaked)

    def close(self) -> None:
        """Leaves. Slabs are unmapped when their holds have been closed; does not wait for that."""
        self.membership.close()
        self._slabs.retire_all(closed=True)
        self._closed = True
        self._do(lambda: None)  # the mapping thread is to see that it was the last

    # what the link's thread calls -------------------------------------------------------------------------------------

    def _hello(self) -> m.Hello | None:
        if not self._slabs.empty:
            self.lost()  # again, in case that something had cut it short
            return None  # something of the old session is still here: it cannot be acknowledged yet
        leaked = {session for session, _ in self._slabs.leaked}
        i = self._identity
        return m.Hello(
            m.PROTOCOL,
            "worker",
            i.engine,
            i.rank,
            i.world,
            i.shard_bytes,
            i.layout,
            options=self._options,
            acknowledges=[session for session in self._left if session not in leaked],
            pins=self._pins,
            replicas=i.replicas,
            facts=i.facts,
        )

    def received(self, message: m.FromWell, fds: Sequence[int]) -> None:
        match message:
            case m.SlabShared():
                for extra in fds[1:]:
                    os.close(extra)
                if fds:
                    self._slabs.come((self._session, message.slab), message, fds[0])
            case m.Landed():
                self._streams.landed(message)
                self.stirred()
            case m.LineMoved():
                self._streams.moved(message)
            case m.SlabRetired(slab=number):
                self._slabs.retire((self._session, number))
            case m.Welcome(session=session):
                self._session = session
                self._streams.joined(session)
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
        self._streams.lost()
        self.stirred()
        self._slabs.retire_all()

    # the mapping thread -----------------------------------------------------------------------------------------------

    def _do(self, job: Callable[[], None]) -> None:
        if self._todo is None:
            job()
        else:
            self._todo.put(job)

    def _map_all(self, todo: SimpleQueue[Callable[[], None]]) -> None:
        over = False
        while not over:
            with suppress(Exception):  # what a job could not even tell; without this thread no session would ever end
                todo.get()()
                over = self._closed and self._slabs.empty

    def _mapped(self, key: Key) -> None:
        session, slab = key
        self._post(session, m.Mapped(slab))

    def _gone(self, key: Key) -> None:
        session, slab = key
        if self._pins:
            self._post(session, m.Unmapped(slab))


__all__ = ["Hold", "Key", "Slot", "WorkerClient"]
