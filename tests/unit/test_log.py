"""The library installs nothing; the well's log is private and bounded; repetition is counted, not written."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import threading
import time
from pathlib import Path

import pytest
from wells import PATIENCE

from stepwell import log
from stepwell.log import RateLimited, well_log


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def target(lines: list[str]) -> logging.Logger:
    target = logging.Logger("test")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    target.addHandler(handler)
    return target


def test_one_line_per_key_and_interval_then_a_count(target: logging.Logger, lines: list[str]) -> None:
    clock = Clock()
    limited = RateLimited(target, 60, clock)
    for number in range(4):
        limited.log(logging.WARNING, "late", "late by %d", number)
    limited.log(logging.WARNING, "full", "full")
    assert lines == ["late by 0", "full"]
    clock.now = 60.0
    limited.log(logging.WARNING, "late", "late by %d", 9)
    assert lines[2:] == ["late by 9 (3 like it not shown)"]
    clock.now = 120.0
    limited.log(logging.WARNING, "late", "late by %d", 10)
    assert lines[3:] == ["late by 10"]


def test_keys_are_bounded_and_the_oldest_is_forgotten(target: logging.Logger, lines: list[str]) -> None:
    limited = RateLimited(target, 60, Clock())
    for number in range(log._MAX_KEYS + 1):
        limited.log(logging.WARNING, f"key {number}", "x")
    assert len(limited._seen) == log._MAX_KEYS
    lines.clear()
    limited.log(logging.WARNING, f"key {log._MAX_KEYS}", "newest")
    limited.log(logging.WARNING, "key 0", "oldest")
    assert lines == ["oldest"]


def test_a_key_that_logged_again_is_not_the_oldest(target: logging.Logger, lines: list[str]) -> None:
    clock = Clock()
    limited = RateLimited(target, 60, clock)
    limited.log(logging.WARNING, "busy", "busy")
    limited.log(logging.WARNING, "rare", "rare")
    clock.now = 60.0
    limited.log(logging.WARNING, "busy", "busy")
    for number in range(log._MAX_KEYS - 1):
        limited.log(logging.WARNING, f"key {number}", "x")
    assert "busy" in limited._seen
    assert "rare" not in limited._seen


def test_the_library_installs_no_handler_of_its_own() -> None:
    assert [type(handler) for handler in log.logger.handlers] == [logging.NullHandler]
    assert log.logger.propagate
    assert log.logger.level == logging.NOTSET


def test_the_well_logs_to_a_private_file_and_a_stream_and_leaves_nothing_behind(tmp_path: Path) -> None:
    stream = io.StringIO()
    old = os.umask(0)
    try:
        with well_log(tmp_path, "info", stream) as path:
            log.logger.debug("hidden")
            logging.getLogger("stepwell.part").info("shown")
    finally:
        os.umask(old)
    assert path.read_text() == stream.getvalue()
    assert path.read_text().endswith("stepwell.part: shown\n")
    assert path.read_text().count("\n") == 1
    assert path.stat().st_mode & 0o777 == 0o600
    test_the_library_installs_no_handler_of_its_own()


def test_a_line_of_text_says_when_in_utc(tmp_path: Path) -> None:
    stream = io.StringIO()
    with well_log(tmp_path, "info", stream):
        logging.getLogger("stepwell.part").handle(record("late", 0.25))
    assert stream.getvalue() == "1970-01-01T00:00:00.250Z WARNING [7] stepwell.part: late\n"


def record(message: str, at: float, *args: object, exc_info: object = None) -> logging.LogRecord:
    made = logging.LogRecord("stepwell.part", logging.WARNING, "f.py", 1, message, args, exc_info)  # type: ignore[arg-type]
    made.created, made.msecs, made.process = at, at % 1 * 1000, 7
    return made


def test_json_is_one_object_a_line(tmp_path: Path) -> None:
    stream = io.StringIO()
    with well_log(tmp_path, "info", stream, form="json") as path:
        target = logging.getLogger("stepwell.part")
        target.handle(record("two\nlines of %s [SW-111]", 0.25, "\u2028é\udcff"))
        target.handle(record("[SW-111] is not at the end", 60))
        try:
            raise ValueError("in\nhere")
        except ValueError as error:
            target.handle(record("it failed", 1, exc_info=(ValueError, error, error.__traceback__)))
    assert path.read_text() == stream.getvalue()
    first, second, third = map(json.loads, stream.getvalue().splitlines())
    assert first == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "warning",
        "process": 7,
        "logger": "stepwell.part",
        "message": "two\nlines of \u2028é\udcff [SW-111]",
        "code": "SW-111",
    }
    assert second.keys() == first.keys() - {"code"}
    assert third.keys() == second.keys() | {"exception"}
    assert third["exception"].endswith("ValueError: in\nhere")


def test_an_existing_log_becomes_private(tmp_path: Path) -> None:
    (tmp_path / log.LOG_NAME).touch(0o644)
    with well_log(tmp_path, "info", io.StringIO()) as path:
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_log_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / log.LOG_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"), well_log(tmp_path, "info", io.StringIO()):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_the_log_rotates_with_one_backup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_ROTATE_BYTES", 1000)
    with well_log(tmp_path, "info", io.StringIO()):
        for number in range(100):
            log.logger.info("line %d of a well that runs for years", number)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["stepwell.log", "stepwell.log.1"]
    assert all(file.stat().st_size <= 1000 and file.stat().st_mode & 0o777 == 0o600 for file in files)


def test_the_log_is_bounded_to_what_is_promised() -> None:
    assert log._ROTATE_BYTES == 8 << 20


def test_a_place_that_hangs_holds_up_no_caller_and_not_the_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Standard error is a pipe that nobody reads, until it is full and 1 MiB more waits."""
    monkeypatch.setattr(log, "_END_SECONDS", PATIENCE)
    read, write = os.pipe()
    lines = 3000
    with open(write, "w") as stream, well_log(tmp_path, "info", stream) as path:
        for number in range(lines):
            log.logger.info("%d %s", number, "x" * 1000)
            if number % 500 == 0:
                wait_for(number + 1, path)
        logged: list[str] = []

        def listen() -> None:
            with open(read, encoding="ascii") as pipe:
                logged.extend(pipe)

        reader = threading.Thread(target=listen)
        reader.start()
    reader.join(PATIENCE)
    last = logged.pop()
    assert "WARNING" in last and " lines that are missing here" in last
    assert len(logged) + int(last.rpartition(" ")[2]) == lines
    assert len(logged) > log._MAX_WAITING // 1100, "what there was room for is not lost"
    assert [line.split()[4] for line in logged] == [str(number) for number in range(len(logged))]


def wait_for(lines: int, path: Path) -> None:
    """The file's own thread is to keep up: what is tried is the other one."""
    deadline = time.monotonic() + PATIENCE
    while path.stat().st_size < 1000 * lines:
        assert time.monotonic() < deadline, "the file is not written"
        time.sleep(0)


def test_nobody_waits_at_the_end_for_a_log_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    healed, stream = threading.Event(), io.StringIO()
    monkeypatch.setattr(log._PrivateFile, "write", lambda self, lines: healed.wait())
    monkeypatch.setattr(log, "_END_SECONDS", 0.05)

    def serve() -> None:
        with well_log(tmp_path, "info", stream):
            log.logger.info("a line")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    ended = not thread.is_alive()
    healed.set()
    assert ended
    assert "a line" in stream.getvalue() and "it does not answer" in stream.getvalue()


def test_a_log_that_cannot_be_written_says_later_what_is_missing(tmp_path: Path) -> None:
    class Disk:
        full, lines = True, bytearray()

        def write(self, lines: bytes) -> None:
            if self.full:
                raise OSError(errno.ENOSPC, "full")
            self.lines.extend(lines)

        def close(self) -> None:
            raise OSError(errno.EIO, "broken")

    disk = Disk()
    handler = log._Beside(disk, logging.Formatter("%(message)s"))
    for number in range(5):
        handler.handle(record(f"line {number}", 0))
    assert handler._background.settle(PATIENCE)
    disk.full = False
    handler.handle(record("line 5", 0))
    assert handler.finish(PATIENCE)
    assert disk.lines.decode().splitlines() == [
        "line 5",
        "lines that are missing here, because they could not be written, or not in time: 5",
    ]


def test_a_log_that_somebody_has_moved_away_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_ROTATE_BYTES", 100)
    with well_log(tmp_path, "info", io.StringIO()) as path:
        path.rename(tmp_path / "elsewhere")
        for number in range(4):
            log.logger.info("line %d", number)
    assert path.read_text().endswith("line 3\n")
