"""Logging: the standard library's logger "stepwell", and nothing installed on it by the library.

An engine that imports stepwell keeps control of its own log. Only the well process, which owns its process, opens a
file and stderr with `well_log`. Whatever can repeat goes through `RateLimited`. Nothing in stepwell may log token
ids, prompt text, tenant names or keys; block ids are shown by at most 8 hex digits. Standard library only.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Literal, TextIO

logger = logging.getLogger("stepwell")
logger.addHandler(logging.NullHandler())

LOG_NAME = "stepwell.log"
_ROTATE_BYTES = 8 << 20
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
    if the file cannot be opened.
    """
    path = home / LOG_NAME
    handlers: list[logging.Handler] = [
        _PrivateFile(path, maxBytes=_ROTATE_BYTES, backupCount=1, encoding="utf-8"),
        logging.StreamHandler(stream or sys.stderr),
    ]
    formatter = JsonLines() if form == "json" else _Utc("%(asctime)s %(levelname)s [%(process)d] %(name)s: %(message)s")
    before = logger.level, logger.propagate
    for handler in handlers:
        handler.setFormatter(formatter)
        logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
    try:
        yield path
    finally:
        logger.setLevel(before[0])
        logger.propagate = before[1]
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()


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


class _PrivateFile(RotatingFileHandler):
    def _open(self) -> TextIOWrapper:
        # The umask decides nothing here, and a symbolic link is not followed to somebody else's file.
        fd = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.fchmod(fd, 0o600)
        return open(fd, "a", encoding=self.encoding)
