"""Jobs that wait for copies: whatever raises while they are looked after, each is over some time, as are the others."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest

from stepwell.engines.paged import lane
from stepwell.engines.paged.lane import Job, Lane, Steps


class Copy:
    """`done` when somebody has waited for it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.done = False
        self.seconds = 0.0
        self._error = error

    def wait(self) -> None:
        self.done = True
        if self._error is not None:
            raise self._error


def steps(said: list[str], name: str, *copies: Copy) -> Steps:
    try:
        for copy in copies:
            yield copy
            said.append(name)
    except OSError:
        said.append(f"{name} failed")
        yield Copy()
    finally:
        said.append(f"{name} ended")


def test_a_copy_that_fails_raises_where_it_is_waited_for() -> None:
    said: list[str] = []
    job = Job(steps(said, "a", Copy(), Copy(OSError()), Copy()))
    job.advance()
    assert said == [] and not job.over
    job.finish()
    assert said == ["a", "a failed", "a ended"] and job.over


def test_a_job_that_is_closed_is_over() -> None:
    said: list[str] = []
    begun, not_begun = Job(steps(said, "a", Copy())), Job(steps(said, "b", Copy()))
    begun.advance()
    begun.close()
    not_begun.close()
    assert begun.over and not_begun.over and said == ["a ended"]


@pytest.mark.parametrize("threaded", [False, True])
def test_all_is_over_after_a_flush(threaded: bool) -> None:
    said: list[str] = []
    jobs = [Job(steps(said, name, Copy(), Copy())) for name in "abc"]
    of = Lane("stepwell-test", threaded=threaded)
    for job in jobs:
        of.put(job)
    of.flush()
    assert all(job.over for job in jobs)
    assert said == [what for name in "abc" for what in (name, name, f"{name} ended")]
    of.close()


class Dies:
    """The n-th line of the lane's own functions raises, on any thread but this one."""

    def __init__(self, nth: int) -> None:
        self.left = nth

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code.co_filename != lane.__file__ or code.co_name not in ("_run", "_over", "finish", "_resume", "over"):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise RuntimeError("on purpose")
        return self


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_anywhere_is_replaced_and_all_jobs_end() -> None:
    died, nth = True, 0
    while died:
        nth += 1
        said: list[str] = []
        dies = Dies(nth)
        before = threading.gettrace()
        threading.settrace(dies)
        try:
            of = Lane("stepwell-test")
        finally:
            threading.settrace(before)  # type: ignore[arg-type]
        jobs = [Job(steps(said, name, Copy(), Copy())) for name in "ab"]
        for job in jobs:
            of.put(job)
        patience = time.monotonic() + 30
        while not all(job.over for job in jobs):
            of.poll()
            assert time.monotonic() < patience, f"line {nth}: {said}"
            time.sleep(0.0005)
        assert "a ended" in said or "b ended" in said, "one of them at most was closed before it began"
        of.close()
        died = dies.left <= 0
    assert nth > 40 and sys.gettrace() is None
