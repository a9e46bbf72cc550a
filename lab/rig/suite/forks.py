"""A pytest plugin, `--forks N`: tests are collected once, and N forks of the process that did so share them.

    parent   collects ──► hands each fork a few tests of one file, and more before its last ──► reports what they send
    fork     runs them as pytest would, in order, its module's and session's fixtures being its own

What loads slowly (torch, an engine) is loaded once, and forks share its memory; so there may be more forks than cores,
and a test that waits holds up no other. A fork that dies fails the test that it ran; another one takes its place.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import time
from collections import deque
from collections.abc import Generator
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest
from _pytest.config import create_terminal_writer

MOST_FORKS = 8
TAKE_DOWN_S = 20.0
TOGETHER = ("e2e", "kernel")
"""Markers of tests that share an engine or a device, file by file."""
MOST_AT_ONCE = 24
"""Tests that are handed over together."""


def pytest_addoption(parser: pytest.Parser) -> None:
    said = f"run tests in so many forks of this process; auto: two a core, at most {MOST_FORKS}"
    parser.addoption("--forks", default="0", metavar="N", help=said)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without the collector, which would look through torch and an engine time and again, and never again after."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # some libraries complain of what is left of theirs when the interpreter ends


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    options = session.config.option
    cores = len(os.sched_getaffinity(0))
    count = min(2 * cores, MOST_FORKS) if options.forks == "auto" else int(options.forks)
    if not count or options.collectonly or (session.testsfailed and not options.continue_on_collection_errors):
        return None
    run = Run(session)
    try:
        run.all(count)
    finally:
        run.end()
    return True


class Fork:
    """`given`: indexes of the tests that it has yet to end, the one that it runs first."""

    def __init__(self, session: pytest.Session, number: int, others: list[Connection]) -> None:
        self.link, far = Pipe()
        self.given: deque[int] = deque()
        self.last = False
        self.pid = os.fork()
        if self.pid == 0:
            for link in (self.link, *others):
                link.close()
            _in_fork(session, number, far)
        far.close()

    def hears(self) -> tuple[str, Any] | None:
        """What it says next; None: it has ended."""
        try:
            said: tuple[str, Any] = self.link.recv()
        except (EOFError, OSError):
            return None
        return said

    def give(self, tests: list[int]) -> None:
        """None: there are no more."""
        self.given += tests
        self.last = not tests
        with contextlib.suppress(OSError):  # it has died, which is noticed where it is listened to
            self.link.send(tests)


class Run:
    def __init__(self, session: pytest.Session) -> None:
        self._session, self._hook = session, session.config.hook
        self._todo = deque(range(len(session.items)))
        self._forks: dict[Connection, Fork] = {}
        self._begun = 0
        self._base = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]

    def all(self, count: int) -> None:
        for _ in range(min(count, len(self._todo))):
            self._begin(count)
        while self._forks:
            for link in wait(list(self._forks)):
                assert isinstance(link, Connection)
                self._listen(self._forks[link], count)
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
                if self._session.shouldstop:
                    raise self._session.Interrupted(self._session.shouldstop)

    def end(self) -> None:
        """Forks that still run are interrupted, and have some time to take down what their tests have set up."""
        for fork in self._forks.values():
            os.kill(fork.pid, signal.SIGINT)
        deadline = time.monotonic() + TAKE_DOWN_S
        for fork in self._forks.values():
            while fork.link.poll(max(0.0, deadline - time.monotonic())) and fork.hears():
                pass
            os.kill(fork.pid, signal.SIGKILL)
            os.waitpid(fork.pid, 0)

    def _begin(self, count: int) -> None:
        fork = Fork(self._session, self._begun, list(self._forks))
        self._begun += 1
        self._forks[fork.link] = fork
        self._feed(fork, count)

    def _feed(self, fork: Fork, count: int) -> None:
        """So that it knows which test follows the one that it runs."""
        while len(fork.given) < 2 and not fork.last:
            fork.give(self._few(count))

    def _few(self, count: int) -> list[int]:
        """Tests of one file: fewer, the fewer there are left; or all that go on where the one before them ended."""
        most = min(MOST_AT_ONCE, 1 + len(self._todo) // (8 * count))
        if self._todo and any(map(self._session.items[self._todo[0]].get_closest_marker, TOGETHER)):
            most = len(self._todo)
        few: list[int] = []
        while self._todo and len(few) < most and (not few or self._file(self._todo[0]) == self._file(few[0])):
            few.append(self._todo.popleft())
        return few

    def _file(self, test: int) -> Path:
        return self._session.items[test].path

    def _listen(self, fork: Fork, count: int) -> None:
        what, data = fork.hears() or ("died", None)
        item = self._session.items[fork.given[0]] if fork.given else None
        if what == "begun" and item is not None:
            self._hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        elif what == "report":
            self._log(self._hook.pytest_report_from_serializable(config=self._session.config, data=data))
        elif what == "ended" and item is not None:
            self._hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
            fork.given.popleft()
            self._feed(fork, count)
        elif what == "died":
            self._ended(fork, count)

    def _log(self, report: pytest.TestReport) -> None:
        self._hook.pytest_runtest_logreport(report=report)

    def _ended(self, fork: Fork, count: int) -> None:
        fork.link.close()
        del self._forks[fork.link]
        _, status = os.waitpid(fork.pid, 0)
        if not fork.given:
            return
        item = self._session.items[fork.given.popleft()]
        why = f"the process that ran it has ended: {os.waitstatus_to_exitcode(status)}"
        self._log(pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call"))
        self._todo.extendleft(reversed(fork.given))
        self._begin(count)


class Sender:
    """Sends a fork's reports to its parent."""

    def __init__(self, config: pytest.Config, link: Connection) -> None:
        self._config, self._link = config, link

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._link.send(("report", data))


def _in_fork(session: pytest.Session, number: int, link: Connection) -> None:
    code = 70
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _made_its_own(session.config, number, link)
        given: deque[int] = deque()
        last = False
        while given or not last:
            while len(given) < 2 and not last:
                more = link.recv()
                given += more
                last = not more
            if given:
                item = session.items[given.popleft()]
                following = session.items[given[0]] if given else None
                link.send(("begun", None))
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                link.send(("ended", None))
        code = 0
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        session._setupstate.teardown_exact(None)
    finally:
        os._exit(code)


def _made_its_own(config: Any, number: int, link: Connection) -> None:
    """What two processes must not share: files of captured output, dice, a folder for temporary files, a terminal."""
    random.seed()
    factory, manager = config._tmp_path_factory, config.pluginmanager
    factory._basetemp = factory.getbasetemp() / str(number)
    factory._basetemp.mkdir(0o700)
    capture = manager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    terminal = manager.getplugin("terminalreporter")
    if terminal is not None:
        nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for as long as the fork lives
        terminal._tw = create_terminal_writer(config, nowhere)
    manager.register(Sender(config, link))
