"""Work that is cut into pieces, which processes share: what one tries, and what all of them found."""

from __future__ import annotations

import os
import random
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import active_children, get_context

from lab.trust.budget import Budget

MOST_EVIDENCE = 8


@dataclass(slots=True)
class Tally:
    """`right`: cases in which something was accepted, and it was what had been written."""

    cases: int = 0
    violations: int = 0
    right: int = 0
    evidence: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def wrong(self, what: str) -> None:
        """One more violation, with what tries it again."""
        self.violations += 1
        if len(self.evidence) < MOST_EVIDENCE:
            self.evidence.append(what)

    def add(self, other: Tally) -> None:
        self.cases += other.cases
        self.violations += other.violations
        self.right += other.right
        self.evidence += other.evidence[: MOST_EVIDENCE - len(self.evidence)]
        self.notes += [note for note in other.notes if note not in self.notes]


@dataclass(frozen=True, slots=True)
class Turn:
    """What a piece is given: dice of its own, which depend on the seed and its name only, and when to end."""

    name: str
    seed: int
    until: float

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.until

    def dice(self, *names: str | int) -> random.Random:
        return random.Random("/".join(map(str, (self.seed, self.name, *names))))


@dataclass(frozen=True, slots=True)
class Piece:
    """`call(turn, *arguments)` of a module's top level; its tally counts for `family`."""

    family: str
    call: Callable[..., Tally]
    arguments: tuple[int | bool | str, ...] = ()

    @property
    def name(self) -> str:
        return "/".join(map(str, (self.family, self.call.__name__, *self.arguments)))


def run_all(pieces: Sequence[Piece], budget: Budget) -> dict[str, Tally]:
    """Tallies by family, in the order of the pieces. A piece that raises, or ends its process, is a violation."""
    tallies = {piece.family: Tally() for piece in pieces}
    for piece, tally in _done(pieces, budget):
        tallies[piece.family].add(tally)
    return tallies


def _done(pieces: Sequence[Piece], budget: Budget) -> Iterator[tuple[Piece, Tally]]:
    pool = ProcessPoolExecutor(budget.processes, get_context("spawn"), _settle_in)
    try:
        futures = {pool.submit(_run, piece, budget.seed, budget.until): piece for piece in pieces}
        told = time.monotonic()
        for number, future in enumerate(as_completed(futures), 1):
            yield futures[future], _outcome(future, futures[future])
            if time.monotonic() - told > 10 or number == len(futures):
                told = time.monotonic()
                budget.tell(f"{number} of {len(futures)} pieces")
    except BaseException:
        for child in active_children():  # who is asked to end does not wait for pieces under way
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _settle_in() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"


def _outcome(future: Future[Tally], piece: Piece) -> Tally:
    try:
        return future.result()
    except BrokenProcessPool:
        tally = Tally(cases=1)
        tally.wrong(f"{piece.name}: the process that tried this, or one beside it, died")
        return tally


def _run(piece: Piece, seed: int, until: float) -> Tally:
    turn = Turn(piece.name, seed, until)
    try:
        return piece.call(turn, *piece.arguments)
    except Exception as error:  # noqa: BLE001 - what nobody expected is what is looked for
        tally = Tally(cases=1)
        at = traceback.extract_tb(error.__traceback__)[-1]
        tally.wrong(f"{piece.name}: {type(error).__name__}: {error} ({at.filename.rsplit('/', 1)[-1]}:{at.lineno})")
        return tally


def memory() -> str | None:
    """A folder whose files cost no device anything, where there is one: for very many small ones."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None


def shares(total: int, each: int) -> Iterable[tuple[int, int]]:
    """Numbers and sizes of parts of at most `each` that make up the total."""
    return enumerate([min(each, total - at) for at in range(0, total, each)])
