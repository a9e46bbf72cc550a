"""`Files` of one life of a well over a simulated disk, in whatever weather there is.

Before each operation a job stands still: whatever else happens may happen now, the end of its process included. Of a
write that is under way at that moment any part may reach the file.
"""

from __future__ import annotations

import errno
import zlib
from random import Random

import numpy as np

from lab.sim.disk import Disk, Inode, failure
from lab.sim.fibres import Fibres, Killed
from lab.sim.trace import Trace
from lab.sim.weather import FAIR, Weather
from stepwell.io.memory import Bytes

PAGE = 4096


class SimFiles:
    """`weather` may be replaced at any time. `zeros`: the filesystem can make them without writing. `handles`: files
    that are open. `seen`: how often each fault came; `met`: how many came in this life. `gone`: files that somebody
    else has deleted meanwhile. `crowded`: what was taken of the space that is reserved for others, if anything was."""

    direct = True

    def __init__(self, disk: Disk, dice: Random, fibres: Fibres, trace: Trace, seen: dict[str, int]) -> None:
        self.disk = disk
        self.weather: Weather = FAIR
        self.zeros = True
        self.handles = self.met = self.gone = 0
        self.crowded = ""
        self.dead = False
        self._dice = dice
        self._fibres = fibres
        self._trace = trace
        self._seen = seen
        self._taken = -1  # by others, when it was last asked how much is free

    def meet(self, operation: str, name: str, *facts: object) -> None:
        """What comes before each operation. Raises OSError and Killed."""
        if self.dead:
            raise Killed
        hang = self.happens("hang")
        self._fibres.pause(hang=hang)
        self._trace(operation, name, *facts)
        if operation in self.weather.operations and self.happens("error"):
            raise failure(self.weather.code)

    def happens(self, fault: str) -> bool:
        probability: float = getattr(self.weather, fault)
        if not probability or self._dice.random() >= probability:
            return False
        self._seen[fault] = self._seen.get(fault, 0) + 1
        self.met += 1
        return True

    def names(self) -> list[str]:
        self.meet("names", "")
        return list(self.disk.names)

    def create(self, name: str, nbytes: int) -> SimFile:
        self.meet("create", name, nbytes)
        inode = self.disk.create(name, nbytes)
        self.taking(name)
        return SimFile(self, name, inode, self._dice)

    def open(self, name: str) -> SimFile:
        self.meet("open", name)
        return SimFile(self, name, self.disk.open(name), self._dice)

    def unlink(self, name: str) -> None:
        self.meet("unlink", name)
        self.disk.unlink(name)

    def sync(self) -> None:
        self.meet("sync names", "")
        self.disk.sync()

    def free(self) -> tuple[int, int]:
        self.meet("free", "")
        self._taken = self.disk.taken
        return self.disk.free, self.disk.total

    def taking(self, name: str) -> None:
        """A file has been made, or gets another life: others must have what is reserved for them, unless they have
        taken some of it since it was asked how much is free."""
        if self.disk.free < self.disk.reserve and self.disk.taken == self._taken:
            self.crowded = f"{name} leaves others {self.disk.free} bytes of {self.disk.reserve}"

    def close(self) -> None:
        pass


class SimFile:
    """One open file. It stays what it was when its name is gone."""

    def __init__(self, files: SimFiles, name: str, inode: Inode, dice: Random) -> None:
        self._files = files
        self._name = name
        self._inode = inode
        self._dice = dice
        self._open = True
        files.handles += 1

    def read(self, into: Bytes, offset: int) -> int:
        self._files.meet("read", self._name, offset, len(into))
        raw = self._inode.data[offset : offset + len(into)]
        if raw and self._files.happens("short"):
            raw = raw[: self._dice.randrange(len(raw))]
        if raw and self._files.happens("rot"):
            raw[self._dice.randrange(len(raw))] ^= 1 << self._dice.randrange(8)
        into[: len(raw)] = np.frombuffer(raw, np.uint8)
        return len(raw)

    def write(self, data: Bytes, offset: int) -> None:
        raw = data.tobytes()
        try:
            self._files.meet("write", self._name, offset, len(raw), zlib.crc32(raw))
        except Killed:
            if part := self._dice.randint(0, len(raw) // PAGE) * PAGE:
                self._inode.write(offset, raw[:part])
            raise
        if not offset:  # a head
            self._files.taking(self._name)
        if self._files.happens("lose"):
            self._inode.lied = True
            return
        if self._files.happens("misdirect"):
            self._write_elsewhere(raw)
            return
        if self._files.happens("short"):
            if part := self._dice.randrange(len(raw) // 512) * 512:
                self._inode.write(offset, raw[:part])
            raise failure(errno.EIO)
        self._inode.write(offset, raw)

    def _write_elsewhere(self, raw: bytes) -> None:
        """In this file or another one, over what is there."""
        inode = self._dice.choice([self._inode, *self._files.disk.names.values()])
        inode.lied = self._inode.lied = True
        if pages := len(inode.data) // PAGE:
            at = self._dice.randrange(pages) * PAGE
            inode.write(at, raw[: len(inode.data) - at])

    def blank(self) -> bool:
        return not self._inode.written

    def zero(self, offset: int, nbytes: int) -> int:
        self._files.meet("zero", self._name, offset, nbytes)
        self._inode.write(offset, bytes(nbytes))
        return 0 if self._files.zeros else nbytes

    def sync(self) -> None:
        self._files.meet("sync", self._name)
        self._inode.sync()

    def size(self) -> int:
        return len(self._inode.data)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._files.handles -= 1
