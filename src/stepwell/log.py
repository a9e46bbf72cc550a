"""Logging: the standard library's logger "stepwell", and nothing installed on it by the library.

An engine that imports stepwell keeps control of its own log. Only the well process, which owns its process, opens a
file and stderr with `well_log`: each is written by a thread of its own, so that a filesystem or a terminal that hangs
holds up no caller and not the other one. Whatever can repeat goes through `RateLimited`. Nothing in stepwell may log
token ids, prompt text, tenant names or keys; block ids are shown by at most 8 hex digits. Standard library only.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, Protocol, TextIO

from stepwell.io.process.background import Background

logger = logging.getLogger("stepwell")
logger.addHandler(logging.NullHandler())

LOG_NAME = "stepwell.log"
_ROTATE_BYTES = 8 << 20
_MAX_WAITING = 1 << 20  # bytes of lines that are not written yet, for each place
_END_SECONDS = 0.5  # for each place
_MAX_KEYS = 256
_CODE = re.compile(r"\[(SW-[0-9]{3})\]\s*\Z")


class RateLimited:
    """At most one line per key and interval; the next line of that key says how many were left out.

    `key` names the kind of event, not its details. At most 256 keys are remembered; beyond that the one that logged
    longest ago is forgotten. Safe to call from any thread.
    """

    def __init__(
        self, target: logging.Logger, per_seconds: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._target = target
        self._per_seconds = per_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[float, int]] = {}  # key -> time of its last line, lines left out since

    def log(self, level: int, key: str, message: str, *args: object) -> None:
        """Log `message % args` at `level`, or count it if `key` had its line in this interval."""
        now = self._clock()
        with self._lock:
            last, left_out = self._seen.get(key, (-float("inf"), 0))
            if now - last < self._per_seconds:
                self._seen[key] = (last, left_out + 1)
                return
            self._seen.pop(key, None)  # keeps the dict in order of the last line
            self._seen[key] = (now, 0)
            if len(self._seen) > _MAX_KEYS:
                del self._seen[next(iter(self._seen))]
        if left_out:
            message, args = f"{message} (%d like it not shown)", (*args, left_out)
        self._target.log(level, message, *args)


@contextmanager
def well_log(
    home: Path, level: str, stream: TextIO | None = None, *, form: Literal["text", "json"] = "text"
) -> Iterator[Path]:
    """Log to `home/stepwell.log` and to `stream` (stderr) while the context lasts; yields the file's path.

    `form` "text" is a line for people, "json" one object a line (see `JsonLines`).

    The file is 0600 and rotates at 8 MiB with one backup, so a well's log never exceeds about 16 MiB. Raises OSError
    if the file cannot be opened. A line that cannot be written, or not before 1 MiB of others is, is left out, and a
    later line says how many were. In the end each has half a second for what waits.
    """
    path = home / LOG_NAME
    formatter = JsonLines() if form == "json" else _Utc("%(asctime)s %(levelname)s [%(process)d] %(name)s: %(message)s")
    handlers = [_Beside(_PrivateFile(path), formatter), _Beside(_Stream(stream or sys.stderr), formatter)]
    before = logger.level, logger.propagate
    for handler in handlers:
        logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
    try:
        yield path
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
            if not handler.finish(_END_SECONDS):
                logger.warning("the last lines of a log are not written: it does not answer")  # where there is another
        logger.setLevel(before[0])
        logger.propagate = before[1]


class _Place(Protocol):
    """Where lines go. Its methods may hang and raise OSError; `lines` writes one or more, whole."""

    def write(self, lines: bytes) -> None: ...

    def close(self) -> None: ...


class _Beside(logging.Handler):
    """Hands lines to a thread that writes them to `place`."""

    def __init__(self, place: _Place, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._place = place
        self._waiting: deque[bytes] = deque()
        self._nbytes = 0
        self._left_out = 0  # since that was last said
        self._counting = threading.Lock()
        self._ended = False
        self._background = Background(self._write, "stepwell-log")

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self._line(record)
        except Exception:  # noqa: BLE001 - what every handler does
            self.handleError(record)
            return
        with self._counting:
            if self._nbytes + len(line) > _MAX_WAITING:
                self._left_out += 1
                return
            self._nbytes += len(line)
            self._waiting.append(line)
        self._background.wake()

    def _line(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode(errors="backslashreplace")

    def _write(self) -> None:
        while True:
            with self._counting:
                line = self._waiting.popleft() if self._waiting else b""
                self._nbytes -= len(line)
                missing = self._left_out
            if line:
                self._count(0 if self._written(line) else 1)
            elif missing and self._written(self._gap(missing)):
                self._count(-missing)
            else:
                break
        if self._ended:
            with suppress(OSError):
                self._place.close()

    def _written(self, line: bytes) -> bool:
        try:
            self._place.write(line)
        except OSError:  # the disk is full, say
            return False
        return True

    def _count(self, lines: int) -> None:
        with self._counting:
            self._left_out += lines

    def _gap(self, lines: int) -> bytes:
        text = "lines that are missing here, because they could not be written, or not in time: %d"
        return self._line(logging.LogRecord(logger.name, logging.WARNING, "", 0, text, (lines,), None))

    def finish(self, seconds: float) -> bool:
        """Writes what waits and closes the place. False: it hangs, and is not waited for any longer."""
        self._ended = True
        self._background.wake()
        self.close()
        return self._background.close(seconds)


class _PrivateFile:
    """Not `RotatingFileHandler`: who ends while a thread of it hangs would wait for its locks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = self._open()
        self._nbytes = os.fstat(self._fd).st_size

    def _open(self) -> int:
        # The umask decides nothing here, and a symbolic link is not followed to another user's file.
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.fchmod(fd, 0o600)
        return fd

    def write(self, lines: bytes) -> None:
        if self._nbytes and self._nbytes + len(lines) > _ROTATE_BYTES:
            self._rotate()
        self._nbytes += len(lines)
        _write_all(self._fd, lines)

    def _rotate(self) -> None:
        with suppress(FileNotFoundError):  # it was moved away
            os.replace(self._path, f"{self._path}.1")
        full, self._fd, self._nbytes = self._fd, self._open(), 0
        os.close(full)

    def close(self) -> None:
        os.close(self._fd)


class _Stream:
    """Past the stream's own buffer, whose lock the end of the interpreter would wait for."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        try:
            self._fd: int | None = stream.fileno()
        except (OSError, ValueError):  # it is one in memory
            self._fd = None

    def write(self, lines: bytes) -> None:
        if self._fd is not None:
            _write_all(self._fd, lines)
        else:
            self._stream.write(lines.decode())

    def close(self) -> None:
        """It is not ours."""


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


class _Utc(logging.Formatter):
    """Times as 2026-11-21T21:56:00.123Z."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self, line: str | None = None) -> None:
        super().__init__(line)
        self.converter = time.gmtime


class JsonLines(_Utc):
    """One JSON object a line, in ASCII: time, level, process, logger, message; code where the message ends in an error
    code; exception where there is one (its traceback as one text)."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        fields: dict[str, object] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "process": record.process,
            "logger": record.name,
            "message": message,
        }
        if match := _CODE.search(message):
            fields["code"] = match[1]
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)
