"""What an engine's worker member says, one for each rank: which slabs it has, and which copies have ended."""

from __future__ import annotations

from stepwell.protocol.base import Message, Numbers


class Mapped(Message, frozen=True):
    """The slab is mapped and prefaulted here: its slots may be leased to this session."""

    slab: int


class Unmapped(Message, frozen=True):
    """Nothing of this slab, which was retired, is left here: its pages are free, as far as this worker goes."""

    slab: int


class Filled(Message, frozen=True):
    """This rank's shards: `leases` are written, `dropped` will never be written by this rank, whatever else is said of
    them. Of ranks that hold the same, the first says so."""

    leases: Numbers
    dropped: Numbers


class BlocksCopied(Message, frozen=True):
    """This rank has copied the first `blocks` blocks of a streamed transfer: their leases end, as far as it goes."""

    transfer: int
    blocks: int


class Recalled(Message, frozen=True):
    """This rank's copies of these transfers have ended, well or badly."""

    transfers: Numbers
