"""Jobs that wait for copies: whatever raises while they are looked after, each is over some time, as are the others."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest

from stepwell.engines.paged import lane
from stepwell.engines.paged.lane import Job, Lane, OpenLane, Steps


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
@pytest.mark.parametrize("kind", [Lane, OpenLane])
def test_all_is_over_after_a_flush(kind: type[Lane], threaded: bool) -> None:
    said: list[str] = []
    jobs = [Job(steps(said, name, Copy(), Copy())) for name in "abc"]
    of = kind("stepwell-test", threaded=threaded)
    for job in jobs:
        of.put(job)
    of.flush()
    assert all(job.over for job in jobs)
    in_turn = [what for name in "abc" for what in (name, name, f"{name} ended")]
    assert said == in_turn if kind is Lane else sorted(said) == sorted(in_turn)
    of.close()


def looks(said: list[str], name: str, found: threading.Event) -> Steps:
    while not found.is_set():
        said.append(f"{name} looks")
        yield None
    said.append(f"{name} found")


@pytest.mark.parametrize("threaded", [False, True])
def test_a_job_that_looks_for_something_keeps_no_other_waiting(threaded: bool) -> None:
    said: list[str] = []
    found = threading.Event()
    of = OpenLane("stepwell-test", threaded=threaded)
    first, copies = Job(looks(said, "a", found)), Job(steps(said, "b", Copy(), Copy()))
    of.put(first)
    of.put(copies)
    ends(of, copies, threaded)
    assert not first.over and said.count("b") == 2
    found.set()
    of.wake()
    ends(of, first, threaded)
    assert said[-1] == "a found"
    of.close()


def ends(of: Lane, job: Job, threaded: bool) -> None:
    patience = time.monotonic() + 30
    while not job.over:
        if not threaded and job.copies:
            job._waits.wait()  # type: ignore[union-attr]
        of.poll()
        assert time.monotonic() < patience


def test_a_job_looks_again_as_soon_as_there_is_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "LOOK_S", 3600.0)
    said: list[str] = []
    found = threading.Event()
    of = OpenLane("stepwell-test")
    job = Job(looks(said, "a", found))
    of.put(job)
    patience = time.monotonic() + 30
    while not said:
        assert time.monotonic() < patience
    found.set()
    of.wake()
    while not job.over:
        assert time.monotonic() < patience
        time.sleep(0.001)
    of.close()


def test_the_thread_of_jobs_side_by_side_ends_when_they_have() -> None:
    found = threading.Event()
    of = OpenLane("stepwell-test")
    job = Job(looks([], "a", found))
    of.put(job)
    of.close()
    assert of._thread is not None and of._thread.is_alive()
    found.set()
    of._thread.join(30)
    assert job.over and not of._thread.is_alive()


LOOKED_AT = ("_run", "_round", "_over", "finish", "go_on", "_resume", "over", "copies")


class Dies:
    """The n-th line of the lane's own functions raises, on any thread but this one."""

    def __init__(self, nth: int) -> None:
        self.left = nth

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code.co_filename != lane.__file__ or code.co_name not in LOOKED_AT:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise RuntimeError("on purpose")
        return self


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", [Lane, OpenLane])
def test_a_thread_that_dies_anywhere_is_replaced_and_all_jobs_end(kind: type[Lane]) -> None:
    died, nth = True, 0
    while died:
        nth += 1
        said: list[str] = []
        dies = Dies(nth)
        before = threading.gettrace()
        threading.settrace(dies)
        try:
            of = kind("stepwell-test")
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
