"""Shows a person that the demo is alive: always on standard error, so that standard output stays a program's.

A bar with rich on a terminal; otherwise, and where rich is not installed, a plain line now and then. Knows nothing of
what is being done.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Protocol

LINE_EVERY_S = 10.0


class Progress(Protocol):
    """Progress of a long task; all calls come from one thread and are cheap."""

    def say(self, text: str) -> None:
        """A line that stays."""

    def waiting(self, text: str) -> Any:
        """A context manager around a stage without steps."""

    def steps(self, text: str, total: int) -> Any:
        """A context manager giving a callable `step(what)`, to be called `total` times, after each step."""


class PlainProgress:
    """Prints one line at the start of each stage, and at most one every ten seconds after that."""

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        self.say(f"{text} ...")
        yield

    @contextmanager
    def steps(self, text: str, total: int) -> Iterator[Any]:
        self.say(f"{text} ...")
        done, shown = 0, time.monotonic()

        def step(what: str) -> None:
            nonlocal done, shown
            done += 1
            if time.monotonic() - shown >= LINE_EVERY_S:
                shown = time.monotonic()
                self.say(f"  {done} of {total}: {what}")

        yield step


class RichProgress:
    """A spinner or a bar with the time left; it disappears, its title stays."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
        with Progress(*columns, console=self._console, transient=True) as bar:
            bar.add_task(text, total=None)
            yield
        self.say(text)

    @contextmanager
    def steps(self, text: str, total: int) -> Iterator[Any]:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        description = TextColumn("{task.description}", markup=False)
        columns = description, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=self._console, transient=True) as bar:
            task = bar.add_task(text, total=total)
            yield lambda what: bar.update(task, advance=1, description=f"{text}: {what}")
        self.say(text)


def progress() -> Progress:
    """The one that suits standard error."""
    return RichProgress() if sys.stderr.isatty() and find_spec("rich") is not None else PlainProgress()
