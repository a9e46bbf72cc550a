"""The slabs that a worker has in its process: mapped, held by copies, let go.

Coming and going are jobs of one mapping thread (`do`); holds are taken and closed by any thread.

    come ──map, populate, prepare──► mapped ──retire──► no new hold ──last hold closed──► undone, unmapped: `gone`

A slab that waits for its holds keeps no other one waiting. Which session is the present one is the caller's business:
it retires what is of another.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stepwell.errors import CapacityError, IntegrityError, StepwellError
from stepwell.io.memory import PIECE, Bytes, Mapping
from stepwell.protocol.messages import SlabShared

Key = tuple[int, int]
"""Session and number of a slab."""

Prepare = Callable[[Bytes], Callable[[], None]]
"""Makes all bytes of a slab known to a driver; what it returns undoes that. Both run on the mapping thread, and may
take a second a GiB. Raises StepwellError, OSError or RuntimeError if the slab cannot be used."""


class Slot(NamedTuple):
    """Slot `number` of a slab: row `number` of `slots`, (slots, shard_bytes) of shared memory. No view of it may
    outlive the hold that it is of."""

    slots: Bytes
    number: int

    @property
    def bytes(self) -> Bytes:
        row: Bytes = self.slots[self.number]
        return row


class _Slab:
    """`usable`: slots may be had. `retired`: none any more, whatever has become of it. `leaked`: it could not be undone
    and stays mapped as long as the process lives. Changed under the lock of `Slabs`."""

    __slots__ = ("_mapping", "_undo", "generations", "holds", "key", "leaked", "retired", "slots", "usable")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.holds = 0
        self.usable = self.retired = self.leaked = False
        self.generations: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
        self.slots: Bytes = np.empty((0, 0), np.uint8)
        self._mapping: Mapping | None = None
        self._undo: Callable[[], None] | None = None

    def map(self, fd: int, shared: SlabShared, shard_bytes: int, prepare: Prepare | None) -> None:
        """Maps, prefaults (an unpopulated mapping copies at a fifth of the speed) and prepares. Raises what these
        raise, with nothing left mapped."""
        mapping = Mapping(fd, shared.nbytes)
        try:
            for start in range(0, shared.nbytes, PIECE):
                mapping.populate(start, min(PIECE, shared.nbytes - start), write=True)
            end = shared.offset + shared.slots * shared.stride
            whole = mapping.bytes[shared.offset : end].reshape(shared.slots, shared.stride)
            self.generations = mapping.bytes[: 8 * shared.slots].view(np.uint64)
            self.slots = whole[:, :shard_bytes]
            self._mapping = mapping
            self._undo = prepare(mapping.bytes) if prepare is not None else None  # last: nothing after it can fail
        except BaseException:
            mapping.close()
            raise

    def unmap(self) -> None:
        """Undoes what preparing did, then unmaps. What the undoing raises leaves it mapped."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()
        self.generations, self.slots = np.empty(0, np.uint64), np.empty((0, 0), np.uint8)
        if self._mapping is not None:
            self._mapping.close()


class Hold:
    """Keeps the slabs of the slots that it gave out mapped until it is closed. Several threads may use it, and any of
    them may close it."""

    def __init__(self, slabs: Slabs) -> None:
        self._slabs = slabs
        self._held: set[_Slab] | None = set()  # None: closed. Under the lock of `slabs`

    def slot(self, session: int, slab: int, slot: int, generation: int) -> Slot:
        """A leased slot. Raises IntegrityError when the lease no longer holds, or this hold was closed."""
        return self._slabs._take(self, (session, slab), slot, generation)

    def close(self) -> None:
        """Idempotent. Does not wait: what it was the last to keep is unmapped by the mapping thread."""
        self._slabs._put_back(self)


class Slabs:
    """`do` runs a job on the mapping thread, jobs one after the other (or at once, where there is no thread). `mapped`
    is told there of each slab that can be used from now on, `gone` of each that was retired and of which nothing is
    left here; `trouble` of what could not be mapped, prepared or undone."""

    def __init__(
        self,
        shard_bytes: int,
        *,
        do: Callable[[Callable[[], None]], None],
        mapped: Callable[[Key], None],
        gone: Callable[[Key], None],
        trouble: Callable[[StepwellError], None],
        prepare: Prepare | None = None,
    ) -> None:
        self._shard_bytes = shard_bytes
        self._do = do
        self._mapped = mapped
        self._gone = gone
        self._trouble = trouble
        self._prepare = prepare
        self._lock = threading.Lock()
        self._known: dict[Key, _Slab] = {}  # all of which something is here, on its way or left over
        self._closed = False

    # copying ----------------------------------------------------------------------------------------------------------

    def hold(self) -> Hold:
        return Hold(self)

    def verify(self, key: Key, slot: int, generation: int) -> None:
        """Raises IntegrityError unless the slab is mapped, not retired, and the slot still has this generation."""
        with self._lock:
            self._find(key, slot, generation)

    def is_renewed(self, key: Key, slot: int, generation: int) -> bool:
        """The slab is mapped and not retired, and the slot has another generation."""
        with self._lock:
            known = self._usable(key)
            return known is not None and int(known.generations[slot]) != generation

    def _usable(self, key: Key) -> _Slab | None:
        """The slab, if it is mapped and not retired. Under the lock."""
        known = self._known.get(key)
        return known if known is not None and known.usable and not known.retired else None

    def _find(self, key: Key, slot: int, generation: int) -> _Slab:
        known = self._usable(key)
        if known is None or int(known.generations[slot]) != generation:
            raise IntegrityError(
                "SW-302",
                what="a slot's content changed",
                why="its generation is another one now",
                fix="nothing needed, the block is recomputed",
            )
        return known

    def _take(self, hold: Hold, key: Key, slot: int, generation: int) -> Slot:
        with self._lock:
            if hold._held is None:
                raise IntegrityError(
                    "SW-302",
                    what="a slot of a copy that has ended was asked for",
                    why="nothing would keep it mapped",
                    fix="report this: it is a bug in stepwell",
                )
            slab = self._find(key, slot, generation)
            if slab not in hold._held:
                hold._held.add(slab)
                slab.holds += 1
            return Slot(slab.slots, slot)

    def _put_back(self, hold: Hold) -> None:
        with self._lock:
            held, hold._held = hold._held, None
            for slab in held or ():
                slab.holds -= 1
            free = [slab for slab in held or () if slab.retired and not slab.holds]
        for slab in free:
            self._let_go(slab)

    # coming and going -------------------------------------------------------------------------------------------------

    def come(self, key: Key, shared: SlabShared, fd: int) -> None:
        """A slab to map. Owns the descriptor."""
        slab = _Slab(key)
        with self._lock:
            wanted = not self._closed and key not in self._known
            if wanted:
                self._known[key] = slab
        if not wanted:
            os.close(fd)
            return
        try:
            self._do(lambda: self._guarded(slab, lambda: self._map(slab, shared, fd)))
        except BaseException:
            os.close(fd)
            with self._lock:
                del self._known[key]
            raise

    def retire(self, key: Key) -> None:
        """Nobody gets a new hold of it from now on, and `gone` will be told. Does not wait."""
        with self._lock:
            known = key in self._known
        if known:
            self._retire([key])
        else:  # it could not be mapped
            self._gone(key)

    def retire_all(self, *, closed: bool = False) -> None:
        """The same for all of them. `closed`: nothing comes any more."""
        with self._lock:
            self._closed = self._closed or closed
            keys = list(self._known)
        self._retire(keys)

    def _retire(self, keys: Iterable[Key]) -> None:
        """Again, for what was retired before: it may be that its unmapping was never begun."""
        with self._lock:
            slabs = [self._known[key] for key in keys if key in self._known]
            for slab in slabs:
                slab.retired = True
            free = [slab for slab in slabs if slab.usable and not slab.holds and not slab.leaked]
        for slab in free:
            self._let_go(slab)

    def _let_go(self, slab: _Slab) -> None:
        self._do(lambda: self._guarded(slab, lambda: self._unmap(slab)))

    def _guarded(self, slab: _Slab, job: Callable[[], None]) -> None:
        """A slab whose job was cut short by what no job expects is in an unknown state: it is leaked, so that neither
        the other slabs nor the next session wait for it."""
        try:
            job()
        except Exception as error:  # noqa: BLE001 - a mapping thread that ends would leave all other slabs as they are
            with self._lock:
                slab.retired = slab.leaked = True
            self._trouble(_leaks(error))

    def _map(self, slab: _Slab, shared: SlabShared, fd: int) -> None:
        try:
            if slab.retired:
                self._forget(slab)
                return
            slab.map(fd, shared, self._shard_bytes, self._prepare)
        except Exception as error:  # noqa: BLE001 - whatever a driver's binding raises
            self._forget(slab)  # never reported as mapped, so never leased to us
            self._unmappable(error)
            return
        finally:
            os.close(fd)
        with self._lock:
            slab.usable = not slab.retired
        if slab.usable:
            self._mapped(slab.key)
        else:
            self._unmap(slab)

    def _unmappable(self, error: Exception) -> None:
        """Blocks in this slab are misses for the whole engine: somebody should know."""
        cause = error if isinstance(error, StepwellError) else None
        self._trouble(
            cause
            or CapacityError(
                "SW-202",
                what="a slab of the arena could not be mapped in a worker",
                why=str(error),
                fix="raise the worker's limits on memory and open files",
            )
        )

    def _unmap(self, slab: _Slab) -> None:
        """Memory that a driver may still know must not be unmapped under it: a slab that cannot be undone is leaked."""
        with self._lock:
            if slab.leaked or self._known.get(slab.key) is not slab:
                return  # asked for twice
        try:
            slab.unmap()
        except Exception as error:  # noqa: BLE001 - whatever a driver's binding raises
            with self._lock:
                slab.leaked = True
            self._trouble(_leaks(error))
            return
        self._forget(slab)

    def _forget(self, slab: _Slab) -> None:
        with self._lock:
            del self._known[slab.key]
            retired = slab.retired
        if retired:
            self._gone(slab.key)

    # what is here -----------------------------------------------------------------------------------------------------

    @property
    def mapped(self) -> int:
        """Slabs that are mapped and prepared, those included that wait for their holds."""
        with self._lock:
            return sum(slab.usable and not slab.leaked for slab in self._known.values())

    @property
    def leaked(self) -> frozenset[Key]:
        """Those that will stay mapped as long as this process lives."""
        with self._lock:
            return frozenset(key for key, slab in self._known.items() if slab.leaked)

    @property
    def empty(self) -> bool:
        """Nothing is here, nor on its way, but what is leaked."""
        with self._lock:
            return all(slab.leaked for slab in self._known.values())


def _leaks(error: Exception) -> CapacityError:
    return CapacityError(
        "SW-206",
        what="a slab stays mapped in a worker until its process ends",
        why=f"it could not be given back: {error}",
        fix="restart the engine if memory gets short",
    )
