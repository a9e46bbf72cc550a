"""Keys, prompts and tenants stay where they belong: in dumps, on disk, in logs, names and messages."""

from __future__ import annotations

from collections.abc import Iterator

from lab.trust.budget import Budget
from lab.trust.report import Row
from lab.trust.secrets import dumps, files, words


def run(budget: Budget) -> Iterator[Row]:
    yield from files.run(budget)  # first: it forks, and no thread has been started yet
    yield from dumps.run(budget)
    yield from words.run(budget)
