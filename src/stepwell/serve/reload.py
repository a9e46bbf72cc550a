"""Reading the settings again, for a well that runs: on SIGHUP, and when `stepwell reload` asks.

asked ──► a job reads and checks them ──► between two turns: those that can be are in force ──► one line, answers
                                └──► they cannot be used: nothing changes ──► the error, answers
                                └──► it takes too long: nothing changes, also when it ends later ──► the error, answers
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from stepwell.config import Settings, check_together
from stepwell.config.reread import changed, in_force
from stepwell.errors import BackendDown, StepwellError
from stepwell.io.clock import Clock
from stepwell.io.executor import Executor
from stepwell.log import RateLimited
from stepwell.protocol.messages import Message, Refused, Reloaded

ANSWER_SECONDS = 5.0
"""Longest time that a read may take before the request is answered; `stepwell reload` waits for 10 s."""

MAX_WAITING = 16
"""Answers that wait for the next read."""

_LOG_SECONDS = 5.0  # between two lines of one kind: an operator looks at each

log = logging.getLogger("stepwell.serve")

Answer = Callable[[Message], None]


class Reloading:
    """`read` may block and raises StepwellError where settings cannot be used. `apply` is called with those in force
    from now on, on the loop's thread. `executor` has a thread for nothing else: home may hang. `idle`: settings without
    a meaning for this well, whose changes are not reported."""

    def __init__(
        self,
        settings: Settings,
        read: Callable[[], Settings],
        apply: Callable[[Settings], None],
        executor: Executor,
        clock: Clock,
        idle: Collection[str] = (),
    ) -> None:
        self._settings = settings
        self._read = read
        self._apply = apply
        self._executor = executor
        self._clock = clock
        self._idle = idle
        self._limited = RateLimited(log, _LOG_SECONDS, clock.now)
        self._reading = False
        self._until: float | None = None  # when the read under way is too late; None as well when it was said to be
        self._answers: list[Answer] = []  # for the read under way
        self._waiting: list[Answer] = []  # for the one after it

    def begin(self, answer: Answer = lambda message: None) -> None:
        """Reads the settings, and once more if they are being read already: they may have changed since."""
        if self._reading and (self._until is None or len(self._waiting) >= MAX_WAITING):
            answer(self._late())
            return
        self._waiting.append(answer)
        if not self._reading:
            self._start()

    @property
    def next_moment(self) -> float | None:
        """When `keep_time` will have something to do."""
        return self._until

    def keep_time(self, now: float) -> None:
        if self._until is None or now < self._until:
            return
        answers, self._answers, self._waiting = [*self._answers, *self._waiting], [], []
        self._until = None
        message = self._late()
        for answer in answers:
            answer(message)

    def _start(self) -> None:
        self._answers, self._waiting = self._waiting, []
        self._reading, self._until = True, self._clock.now() + ANSWER_SECONDS
        found: list[Settings] = []

        def job() -> None:
            settings = self._read()
            check_together(settings)
            found.append(settings)

        def done(error: BaseException | None) -> None:
            self._reading = False
            if self._until is None:  # all were answered that nothing has changed, and that stays true
                self._say(logging.INFO, "back", "the settings can be read again: `stepwell reload` does it")
                return
            self._until = None
            answers, self._answers = self._answers, []
            message = self._refused(error) if error is not None else self._take(found[0])
            for answer in answers:
                answer(message)
            if self._waiting:
                self._start()

        self._executor.submit(job, done)

    def _take(self, wanted: Settings) -> Message:
        before, self._settings = self._settings, in_force(self._settings, wanted)
        news = changed(before, self._settings)
        live = [(name, *values) for name, values in news.items() if name not in self._idle]
        restart = list(changed(self._settings, wanted))
        self._apply(self._settings)
        if live:
            log.info("%s", line(live, restart))  # each change has its line
        else:
            self._say(logging.INFO, "read", line(live, restart))
        return Reloaded(live, restart)

    def _say(self, level: int, kind: str, text: str) -> None:
        self._limited.log(level, kind, "%s", text)

    def _late(self) -> Message:
        error = BackendDown(
            "SW-513",
            what="the settings cannot be read now, and nothing has changed",
            why=f"the file, or the filesystem that it lies on, has not answered for {ANSWER_SECONDS:g} s, or too many"
            " ask at once",
            fix="see that the file can be read from a shell, then reload again; the well serves as before",
        )
        self._say(logging.ERROR, error.code, str(error))
        return Refused(error.code, error.what, error.why, error.fix)

    def _refused(self, error: BaseException) -> Message:
        if not isinstance(error, StepwellError):
            text = f"the settings are not read again, and nothing has changed: {type(error).__name__}: {error}"
            self._say(logging.ERROR, "unknown", text)
            return Refused("SW-103", "the settings cannot be read", str(error), "see the reason; nothing has changed")
        what = f"nothing has changed: {error.what}"
        told = type(error)(error.code, what=what, why=error.why, fix=error.fix)
        if "tenant" in f"{told.what} {told.why}":  # their names are nothing for a log
            text = f"nothing has changed: tenants cannot be used; `stepwell config check` says why [{error.code}]"
        else:
            text = str(told)
        self._say(logging.ERROR, error.code, text)
        return Refused(error.code, what, error.why, error.fix)


def line(live: Sequence[tuple[str, str, str]], restart: Sequence[str]) -> str:
    """The result in one line for people. Values of settings that need a restart are left out: tenants are among
    them."""
    parts = [f"{name} = {now} (was {before})" for name, before, now in live]
    said = f"settings read again: {', '.join(parts) or 'nothing has changed'}"
    return f"{said}; a restart of the well is needed for {', '.join(restart)}" if restart else said
