"""An executor whose jobs may stand still between any two operations on files, in an order that the dice choose.

A job is a plain function that blocks; to stop in the middle of it, it runs on a thread of its own. Only one of all
these threads, or the one that steps, ever runs: each hands the baton on. So the order is that of the dice alone.
"""

from __future__ import annotations

import threading
from random import Random

from stepwell.io.executor import Done, Job

MAX_RUNNING = 8
"""Jobs that have begun and not ended, as a well has threads."""


class Killed(BaseException):
    """The process that this job belongs to is no more."""


class _Thread:
    """Runs one job after the other, while it has the baton."""

    def __init__(self) -> None:
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._job: Job | None = None
        self.error: BaseException | None = None
        self.ended = self.doomed = False
        threading.Thread(target=self._run, daemon=True).start()

    def begin(self, job: Job | None) -> None:
        """None: it is needed no more."""
        self._job, self.error, self.ended, self.doomed = job, None, False, False
        self.go_on()

    def go_on(self) -> None:
        """Until the job pauses or ends."""
        self._go.release()
        self._back.acquire()

    def pause(self) -> None:
        """On this thread. Raises Killed."""
        self._back.release()
        self._go.acquire()
        if self.doomed:
            raise Killed

    def _run(self) -> None:
        while True:
            self._go.acquire()
            job, self._job = self._job, None
            if job is not None:
                self.error = outcome(job)
            self.ended = True
            self._back.release()
            if job is None:
                return


def outcome(job: Job) -> BaseException | None:
    """Runs it; what it raised."""
    try:
        job()
    except (Exception, Killed) as raised:  # noqa: BLE001 - an executor hands every failure to its caller
        return raised
    return None


class Fibres:
    """An `Executor`. `halting`: the share of jobs that stand still at every operation; the others run in one go."""

    def __init__(self, dice: Random) -> None:
        self.halting = 0.25
        self._dice = dice
        self._waiting: list[tuple[Job, Done]] = []
        self._paused: list[tuple[_Thread, Done]] = []
        self._hanging: list[tuple[_Thread, Done]] = []
        self._ended: list[tuple[Done, BaseException | None]] = []
        self._idle: list[_Thread] = []
        self._current: _Thread | None = None
        self._hangs = False  # the one that runs

    def submit(self, job: Job, done: Done) -> None:
        self._waiting.append((job, done))

    @property
    def busy(self) -> bool:
        """Something can be done."""
        return bool(self._waiting or self._paused or self._ended)

    @property
    def hanging(self) -> int:
        return len(self._hanging)

    def step(self) -> bool:
        """Begins a job, lets one go on, or delivers a completion. False: there is nothing to do."""
        room = len(self._paused) + len(self._hanging) < MAX_RUNNING
        waiting = len(self._waiting) if room else 0
        total = waiting + len(self._paused) + len(self._ended)
        if not total:
            return False
        at = self._dice.randrange(total)
        if at < waiting:
            self._begin(*self._waiting.pop(at))
        elif at < waiting + len(self._paused):
            self._go_on(*self._paused.pop(at - waiting))
        else:
            done, error = self._ended.pop(at - waiting - len(self._paused))
            done(error)
        return True

    def _begin(self, job: Job, done: Done) -> None:
        if self._dice.random() >= self.halting:
            self._ended.append((done, outcome(job)))
            return
        thread = self._idle.pop() if self._idle else _Thread()
        self._current = thread
        thread.begin(job)
        self._came_back(thread, done)

    def _go_on(self, thread: _Thread, done: Done) -> None:
        self._current = thread
        thread.go_on()
        self._came_back(thread, done)

    def _came_back(self, thread: _Thread, done: Done) -> None:
        self._current = None
        hangs, self._hangs = self._hangs, False
        if thread.ended:
            self._idle.append(thread)
            if not thread.doomed:
                self._ended.append((done, thread.error))
        else:
            (self._hanging if hangs else self._paused).append((thread, done))

    # what a job calls, before each of its operations ------------------------------------------------------------------

    def pause(self, *, hang: bool = False) -> None:
        """Lets others go first. Raises Killed. Does nothing in a job that runs in one go."""
        if self._current is not None:
            self._hangs = hang
            self._current.pause()

    # ends -------------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """What hangs goes on."""
        self._paused += self._hanging
        self._hanging.clear()

    def kill(self) -> None:
        """No job goes on and none completes: their process is gone."""
        self._waiting.clear()
        self._ended.clear()
        for thread, done in [*self._paused, *self._hanging]:
            thread.doomed = True
            self._go_on(thread, done)
        self._paused.clear()
        self._hanging.clear()

    def close(self) -> None:
        """Ends the threads. Nothing may be running."""
        for thread in self._idle:
            thread.begin(None)
        self._idle.clear()
