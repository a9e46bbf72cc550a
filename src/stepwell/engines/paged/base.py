"""The interface of copies between an engine's pages and slots, whatever the device.

A shard lies in its slot page by page, and within a page layer by layer:

    slot:  | page 0: layer 0 | layer 1 | ... | page 1: layer 0 | ... |

Pages are opaque bytes. An engine on a GPU hands its work to a queue and goes on; copies have queues of their own. So
each copy says after which of the engine's work it may begin, and the engine's work can be held back until copies that
run have left its pages. On CPU both are over when they return.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from stepwell.client.worker import Slot
from stepwell.io.memory import Bytes


class Shard(NamedTuple):
    """A slot, from its page `skip` on, and the engine's pages that go with it, in order."""

    slot: Slot
    skip: int
    pages: Sequence[int]


class Mark(Protocol):
    """A point in the engine's work."""

    def seconds_after(self, earlier: Mark) -> float | None:
        """Seconds that the work between them took; None if it has not ended."""


class Copying(Protocol):
    """Copies that are under way or have ended."""

    @property
    def done(self) -> bool:
        """They have ended, well or not."""

    def wait(self) -> None:
        """Returns when they are done; does not hold the GIL. Raises what went wrong, at every call."""

    @property
    def seconds(self) -> float:
        """How long they took, without what they waited for; 0.0 until they are done."""


class Fetched(NamedTuple):
    """Pages on their way into memory of their own: `bytes`, (pages, page_bytes), are theirs when `copying` is done."""

    copying: Copying
    bytes: Bytes


class Copies(Protocol):
    """Copies of one rank's KV. Indices are checked before anything is copied: a wrong one raises IndexError. The caller
    keeps slots mapped until their copies are done. Safe for several threads, but `hold_back` and `now` are for the
    engine's alone."""

    num_pages: int
    page_bytes: int
    inline_bytes: int
    """Recalls of a step that it copies itself, and waits for: where cores are few a copy beside the forward would take
    the forward's time. 0: none, they run beside it."""

    overlaps: bool
    """Copies may still run when the engine's next step is handed over, so `hold_back` has to name the pages that it
    writes."""

    def now(self) -> Mark:
        """The point after all work that the engine has handed over until now."""

    def gather(self, shards: Sequence[Shard], after: Mark) -> Copying:
        """Copies the engine's pages into the slots, which they must fill: what else is in a slot is another block's.
        Raises only where nothing was begun or all of it has ended."""

    def scatter(self, shards: Sequence[Shard], after: Mark) -> Copying:
        """Copies the slots into the engine's pages. Begins when copies out of these pages that are under way have
        ended. Raises as `gather` does."""

    def fetch(self, pages: Sequence[int], after: Mark) -> Fetched:
        """Copies pages into memory of their own. Raises as `gather` does."""

    def hold_back(self, pages: Collection[int]) -> None:
        """Makes the engine's later work begin when no copy under way touches these pages. Does not wait."""

    def errors(self, fresh: Bytes, stored: Bytes) -> list[float]:
        """How far each layer's K, then its V, of `fresh` is from `stored`, both (pages, page_bytes): relative errors.
        Where K and V are one (MLA), its two halves stand for them. Raises KeyError for numbers that cannot be
        compared."""

    @property
    def prepare(self) -> Callable[[Bytes], Callable[[], None]] | None:
        """Prepares a slab's memory once, before the first copy; returns a function that undoes it. None if no
        preparation is needed. May block for a second a GiB. Raises CapacityError SW-208 when the driver refuses."""

    def close(self) -> None:
        """Ends threads when they have done what they were given. Does not wait."""
