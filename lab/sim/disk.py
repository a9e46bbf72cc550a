"""A disk with one directory, as a running system sees it and as a power cut may leave it.

What was written and not synced is pending. Of the pending writes of each file a power cut keeps any, loses any, and
tears any at 512 bytes or 4 KiB: so later ones may be there without earlier ones. Of pending names (files created and
unlinked) it keeps the first so many, as a journal does, or any. A file whose name was kept may have no length, or only
as much as was written to it. Syncing a file makes its bytes durable, and not its name; syncing the directory, names.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from random import Random

MAX_PENDING = 64
"""Writes of one file that may be pending; beyond them the oldest reach the disk by themselves."""

_MOODS = ((0.0, 0.0), (1.0, 0.0), (0.4, 0.3), (0.7, 0.3), (0.1, 0.6), (0.0, 1.0))
"""Shares of the pending writes that a power cut keeps and tears; the rest is lost."""


@dataclass(slots=True, eq=False)
class Inode:
    """`data` is what reads see; `durable`, what is on the disk whatever happens. `written`, `touched`: whether anything
    but space is in them. `sized`: its length is durable. `lied`: a write to it was confirmed and not done, or one came
    here that was meant for another place."""

    data: bytearray
    durable: bytearray
    pending: list[tuple[int, bytes]] = field(default_factory=list)
    sized: bool = False
    written: bool = False
    touched: bool = False
    changes: int = 0
    lied: bool = False

    def write(self, offset: int, raw: bytes) -> None:
        _put(self.data, offset, raw)
        self.written = True
        self.changes += 1
        self.pending.append((offset, raw))
        if len(self.pending) > MAX_PENDING:
            self._reach(MAX_PENDING // 2)

    def sync(self) -> None:
        self._reach(len(self.pending))
        self.sized = True

    def _reach(self, count: int) -> None:
        """The oldest of what is pending is on the disk now."""
        for offset, raw in self.pending[:count]:
            _put(self.durable, offset, raw)
            self.touched = True
        del self.pending[:count]

    def after_power_cut(self, dice: Random) -> Inode:
        after, touched = bytearray(self.durable), self.touched
        keep, tear = dice.choice(_MOODS)
        grain, end = dice.choice((512, 4096)), 0
        for offset, raw in self.pending:
            fate = dice.random()
            if fate < keep:
                _put(after, offset, raw)
            elif fate < keep + tear:
                for at in range(0, len(raw), grain):
                    if dice.getrandbits(1):
                        _put(after, offset + at, raw[at : at + grain])
            else:
                continue
            touched, end = True, max(end, offset + len(raw))
        if not self.sized and dice.random() < 0.3:
            del after[dice.choice((0, end)) :]
        return Inode(after, bytearray(after), [], True, touched, touched, lied=self.lied)


def _put(into: bytearray, offset: int, raw: bytes) -> None:
    if len(into) < offset:
        into.extend(bytes(offset - len(into)))
    into[offset : offset + len(raw)] = raw


class Disk:
    """`total` bytes, of which others have `taken` some; files of ours may have `limit`, and `reserve` is to stay free:
    nobody but the oracle looks at these two. Raises the OSErrors that a filesystem would."""

    def __init__(self, total: int, reserve: int = 0) -> None:
        self.total = total
        self.reserve = reserve
        self.limit = 0
        self.taken = 0
        self.names: dict[str, Inode] = {}
        self._durable: dict[str, Inode] = {}
        self._pending: list[tuple[str, Inode | None]] = []  # names that came, with what, or went
        self._changes = 0

    @property
    def changes(self) -> int:
        """Grows whenever something is written, comes or goes."""
        return self._changes + sum(inode.changes for inode in self.names.values())

    @property
    def used(self) -> int:
        return sum(len(inode.data) for inode in self.names.values())

    @property
    def free(self) -> int:
        return max(0, self.total - self.taken - self.used)

    @property
    def lied(self) -> bool:
        """A file that is there, or that a power cut may bring back, has not what it was said to have."""
        came = (inode for _, inode in self._pending if inode is not None)
        return any(inode.lied for inode in (*self.names.values(), *self._durable.values(), *came))

    def create(self, name: str, nbytes: int) -> Inode:
        if name in self.names:
            raise failure(errno.EEXIST)
        if nbytes > self.free:
            raise failure(errno.ENOSPC)
        inode = self.names[name] = Inode(bytearray(nbytes), bytearray(nbytes))
        self._pending.append((name, inode))
        self._changes += 1
        return inode

    def open(self, name: str) -> Inode:
        if name not in self.names:
            raise failure(errno.ENOENT)
        return self.names[name]

    def unlink(self, name: str) -> None:
        inode = self.names.pop(name, None)
        if inode is None:
            raise failure(errno.ENOENT)
        self._pending.append((name, None))
        self._changes += 1 + inode.changes

    def sync(self) -> None:
        """Names that came and went, all of them."""
        self._durable = dict(self.names)
        self._pending.clear()

    def after_power_cut(self, dice: Random) -> Disk:
        """What may be there then: one of very many possibilities."""
        kept = self._pending[: dice.randint(0, len(self._pending))]
        if dice.random() < 0.25:
            kept = [each for each in self._pending if dice.getrandbits(1)]
        names = dict(self._durable)
        for name, inode in kept:
            if inode is None:
                names.pop(name, None)
            else:
                names[name] = inode
        after = Disk(self.total, self.reserve)
        after.names = {name: inode.after_power_cut(dice) for name, inode in names.items()}
        after._durable = dict(after.names)
        return after


def failure(code: int) -> OSError:
    return OSError(code, os.strerror(code))
