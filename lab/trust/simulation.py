"""The whole well in a deterministic simulation: walks in which everything may go wrong, and states of disks after power
cuts (`lab.sim`). A seed that breaks a promise replays exactly; the evidence says with which command."""

from __future__ import annotations

import multiprocessing
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from itertools import islice, repeat
from typing import Any

from lab.sim.walk import STEPS, Walked, walk
from lab.trust.budget import Budget
from lab.trust.report import Row

LONG = 3000
"""Steps of a walk in foul weather."""

CUTS = 400
"""States after power cuts in a walk that is there for them, at most."""

_EVIDENCE = 5
_AHEAD = 2
_FAULTS = ("error", "short", "rot", "rot at rest", "lose", "misdirect", "hang", "kills", "power cuts",
           "lost connections", "exits", "stops", "clears held", "clears not held")  # fmt: skip

_REMOTE = tuple(f"remote: {what}" for what in ("fail", "flip", "swap", "lose", "hang", "vanished", "appeared"))


def run(budget: Budget) -> Iterable[Row]:
    walks, states = budget.of(ci=75, full=20_000), budget.of(ci=50_000, full=1_000_000)
    beside = budget.of(ci=25, full=5_000)
    foul, cut = _Sum(f"--steps {LONG}"), _Sum(f"--steps {STEPS} --cuts {CUTS}")
    busy, paused, two, parts = (_Sum(f"--steps {LONG} --{how}") for how in ("traffic", "pauses", "remote", "groups"))

    def asked() -> Iterator[_Asked]:
        """The number of walks that are there for power cuts is known when their states have been counted."""
        yield from _walks(budget, foul, "walks", LONG, walks)
        yield from _walks(budget, busy, "traffic", LONG, beside, traffic=True)
        yield from _walks(budget, paused, "pauses", LONG, beside, pauses=True)
        yield from _walks(budget, two, "two levels", LONG, beside, remote=True)
        yield from _walks(budget, parts, "groups", LONG, beside, groups=True)
        yield from _walks(budget, cut, "cuts", STEPS, None, cuts=CUTS)

    with ProcessPoolExecutor(budget.processes, multiprocessing.get_context("spawn")) as pool:
        for kind, walked in _in_order(pool, budget, asked()):
            told, cut.told = cut.told, (cut.states + walked.states) // 20_000
            kind.add(walked)
            if kind is foul and foul.walks % 100 == 0:
                budget.tell(f"{foul.walks} of {walks} walks, {foul.right:,} blocks recalled")
            if cut.told > told:
                budget.tell(f"{cut.states:,} of {states:,} states after power cuts")
            if cut.states >= states:
                break
    return _rows(budget.seed, foul, busy, paused, two, parts, cut)


def _told(walks: _Sum, events: tuple[str, ...]) -> str:
    """How often each of these happened."""
    return ", ".join(f"{walks.seen[what]:,} {what.removeprefix('remote: ')}" for what in events)


class _Sum:
    """What walks of one kind have found together."""

    def __init__(self, how: str) -> None:
        self.walks = self.requests = self.right = self.states = self.told = 0
        self.seen: Counter[str] = Counter()
        self.broken: Counter[str] = Counter()
        self.evidence: dict[str, list[str]] = {}
        self._how = how

    def add(self, walked: Walked) -> None:
        self.walks += 1
        self.requests += walked.requests
        self.right += walked.right
        self.states += walked.states
        self.seen += walked.seen
        if walked.violation is not None:
            promise = walked.violation.promise
            self.broken[promise] += 1
            told = self.evidence.setdefault(promise, [])
            if len(told) < _EVIDENCE:
                command = f"python -m lab.sim --seed {walked.seed} {self._how}"
                told.append(f"{walked.violation.what}: {command}")


_Asked = tuple[_Sum, Callable[[], Walked]]
"""A walk, and the sum that it belongs to."""


def _walks(budget: Budget, kind: _Sum, name: str, steps: int, count: int | None, **how: Any) -> Iterator[_Asked]:
    """So many walks of one kind, or without an end."""
    dice = budget.dice("simulation", name)
    for _ in repeat(None) if count is None else repeat(None, count):
        yield kind, partial(walk, dice.randrange(1 << 32), steps, **how)


def _in_order(pool: ProcessPoolExecutor, budget: Budget, asked: Iterator[_Asked]) -> Iterator[tuple[_Sum, Walked]]:
    """What came of one walk after the other, until there is no time left or nobody wants more. What is asked for ahead
    keeps all processes busy; when the end comes it was in vain."""
    running: deque[tuple[_Sum, Future[Walked]]] = deque()
    try:
        while not budget.over:
            for kind, each in islice(asked, _AHEAD * budget.processes - len(running)):
                running.append((kind, pool.submit(each)))
            if not running:
                return
            kind, future = running.popleft()
            yield kind, future.result()
    finally:
        for _, future in running:
            future.cancel()


def _rows(seed: int, foul: _Sum, busy: _Sum, paused: _Sum, two: _Sum, parts: _Sum, cut: _Sum) -> list[Row]:
    faults = _told(foul, _FAULTS)
    every, unpaused = (foul, busy, paused, two, parts, cut), (foul, two, parts, cut)
    seen = sum((one.seen for one in every), Counter[str]())

    def tried(promise: str, *ends: str) -> int:
        """Cases that came to one of these ends, and those that broke the promise: not walks that broke another one."""
        return sum(seen[end] for end in ends) + sum(one.broken[promise] for one in every)

    def row(promise: str, cases: int, key: str, sums: tuple[_Sum, ...], remark: str) -> Row:
        evidence = tuple(each for one in sums for each in one.evidence.get(key, ()))
        return Row(promise, cases, sum(one.broken[key] for one in sums), seed, remark, evidence)

    looks = tried("looks", "seen to be there", "looks believed", "looks that were wrong")
    after_faults = tried("hits", "asked after faults")
    found_again = tried("warm", "found after a kill", "found after a stop")
    return [
        row("recalls are right or misses, simulated faults", foul.right + busy.right + paused.right, "wrong",
            (foul, busy, paused),
            f"blocks recalled in {foul.walks + busy.walks + paused.walks:,} walks of {LONG:,} steps: {faults} against "
            "disks that had lied"),
        row("recalls are right or misses with a shared tier below the disk", two.right, "wrong", (two,),
            f"blocks recalled in {two.walks:,} walks: {_told(two, _REMOTE)} of the shared tier"),
        row("recalls of windows and states are right and whole, or misses", parts.right, "wrong", (parts,),
            f"parts of blocks recalled in {parts.walks:,} walks, in which most engines have a model with several cache "
            f"groups: {parts.seen['recalled with a tail']:,} recalls of a prefix and a tail, "
            f"{parts.seen['ended: no_window']:,} prefixes without a tail; {_told(parts, _FAULTS)} against disks that "
            "had lied"),
        row("what a look says is there was stored, and is not said to be there for ever", looks, "looks", (parts,),
            f"parts that looks said were there: {parts.seen['seen to be there']:,} while all went on, and each of the "
            f"others was asked for in the end: {parts.seen['looks that were wrong']:,} had gone"),
        row("recalls are right or misses, simulated power cuts", cut.states, "wrong", (cut,),
            f"different states of disks, each opened by a fresh well and asked for all; {cut.right:,} blocks recalled"),
        row("requests end within their limits, simulated clock", sum(one.requests for one in unpaused), "late",
            unpaused,
            "requests whose every wait was compared with ADR 0015, tiers that hang included; "
            f"{seen['streams']:,} were recalled as streams"),
        row("requests end within their limits while others recall and a tier hangs", busy.requests, "late", (busy,),
            f"requests in {busy.walks:,} walks, in which tiers hung {busy.seen['hung beside traffic']:,} times"),
        row("requests end within their limits while recalls and spills are paused and resumed", paused.requests, "late",
            (paused,), f"requests in {paused.walks:,} walks; {paused.seen['ended: paused']:,} were answered `paused`"),
        row("nothing begins that is paused", paused.seen["paused recalls"] + paused.seen["paused spills"], "paused",
            (paused,), f"pauses, of which {paused.seen['began paused']:,} went on in the next life of a well"),
        row("books balance, nothing is left or raised", tried("books", "came to the end"), "books",
            every,
            "walks; pins, leases, quarantines, queues and descriptors at the end, bytes on each disk after each step"),
        row("hits come back after faults stop", after_faults, "hits", every,
            "walks, asked in the very well that saw the faults, in host memory, and for what it wrote then in the next "
            f"one; {seen['asked without faults']:,} others were asked in a well that had seen none; "
            f"{seen['streams in fair weather']:,} streams brought all that was known"),
        row("what was written is found by the next well", found_again, "warm", every,
            f"ends of wells: {seen['found after a kill']:,} kills, {seen['found after a stop']:,} stops; "
            f"{seen['no room on disk']:,} others had too little room beside what is kept"),
    ]  # fmt: skip
