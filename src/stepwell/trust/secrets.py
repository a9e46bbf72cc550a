"""Keys, prompts and tenants stay where they belong: in dumps, on disk, in logs, names and messages."""

from __future__ import annotations

from collections.abc import Iterator

from stepwell.trust import secret_dumps, secret_files, secret_words
from stepwell.trust.budget import Budget
from stepwell.trust.report import Row


def run(budget: Budget) -> Iterator[Row]:
    yield from secret_files.run(budget)  # first: it forks, and no thread has been started yet
    yield from secret_dumps.run(budget)
    yield from secret_words.run(budget)
