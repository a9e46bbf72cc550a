"""A well that notes when each block is read from its disk and opened: `python -m lab.bench.streams.watched HOME MARKS`.

Settings come as JSON on standard input. When the well has ended, MARKS has a line for each block that was read: where
it lay (SLOT_REF bytes, in hexadecimal), and when its parts were read and opened, in seconds of the clock that all
processes of a machine share.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from lab.bench.processes import end_orderly
from stepwell.config import load
from stepwell.hierarchy.arena.records import Entry
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.io.files import SystemFile
from stepwell.io.memory import Bytes
from stepwell.serve.process import run
from stepwell.tiers.base import Incoming, Reading

Span = tuple[float, float]

_read, _incoming = SystemFile.read, Sealing.incoming


class Watch:
    """A read is one of all blocks of which the same thread opens a part before its next read."""

    def __init__(self) -> None:
        self.blocks: list[tuple[bytes, list[Span], list[Span]]] = []
        self._thread = threading.local()

    def read(self, file: SystemFile, into: Bytes, offset: int) -> int:
        began = time.monotonic()
        done = _read(file, into, offset)
        self._thread.read = began, time.monotonic()
        return done

    def incoming(self, sealing: Sealing, entry: Entry) -> Incoming:
        block = _incoming(sealing, entry)
        reads: list[Span] = []
        opened: list[Span] = []
        self.blocks.append((entry.refs, reads, opened))

        def timed(part: int, frame: Bytes, segment: bytes) -> Reading:
            if self._thread.read not in reads:
                reads.append(self._thread.read)
            began = time.monotonic()
            answer = block.open(part, frame, segment)
            opened.append((began, time.monotonic()))
            return answer

        return replace(block, open=timed)


def main() -> None:
    home, marks = map(Path, sys.argv[1:])
    settings, watch = load(home, os.environ, overrides=json.load(sys.stdin)).settings, Watch()
    with (
        patch.object(SystemFile, "read", lambda *call: watch.read(*call)),
        patch.object(Sealing, "incoming", lambda *call: watch.incoming(*call)),
    ):
        run(home, settings)
    marks.write_text("".join(f"{json.dumps([refs.hex(), *spans])}\n" for refs, *spans in watch.blocks))


if __name__ == "__main__":
    end_orderly()
    main()
