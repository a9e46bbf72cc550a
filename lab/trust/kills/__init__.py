"""Processes that are killed, hindered and starved in the middle of their work: wells and engines, over real files."""

from __future__ import annotations

from collections.abc import Iterable

from lab.trust.budget import Budget
from lab.trust.kills import engines, memory, starved, wells
from lab.trust.kills.lanes import Lane, Tally, spread
from lab.trust.kills.nth import calls
from lab.trust.kills.nth import engines as nth_engines
from lab.trust.kills.nth import wells as nth
from lab.trust.report import Row


def run(budget: Budget) -> Iterable[Row]:
    yield from _wells(budget)
    yield from _engines(budget)
    yield from _calls(budget)
    yield from _starved(budget)


def _wells(budget: Budget) -> Iterable[Row]:
    tally = spread(budget, "kills of wells by fork", wells.by_fork, budget.of(900, 90_000), 100)
    tally += spread(budget, "kills of wells by exec", wells.by_exec, budget.of(200, 10_000), 50)
    n = tally.n
    seen = f"blocks compared, {n['staged']:,} from disk; {n['kills']:,} kills, {n['early']:,} before it served"
    kept = f"lives that were asked; {n['kept']:,} of {n['told']:,} blocks that the life before had stored were there"
    yield _row(budget, tally, "wrong", "a recall after a kill of the well is right or a miss", n["right"], seen)
    yield _row(budget, tally, "cold", "the next well finds what was stored", n["heirs"], kept)
    left = "kills; files, bytes on disk, wells that do not begin"
    yield _row(budget, tally, "left", "no file is left after a kill of the well", n["kills"], left)
    held = "wells after lines of kills, whose engine has left; sessions, leases, pins, bytes on disk, then the socket"
    yield _row(budget, tally, "held", "a well after many kills holds nothing for anybody", n["lines"], held)


def _engines(budget: Budget) -> Iterable[Row]:
    tally = spread(budget, "kills of engines", engines.kills, budget.of(40, 5_000), 20)
    n = tally.n
    seen = f"blocks compared beside {n['kills']:,} killed engines, {n['theirs']:,} of them spilled by those"
    yield _row(budget, tally, "wrong", "a recall beside a killed engine is right or a miss", n["right"], seen)
    left = f"kills, {n['haunts']:,} of them of engines that went on writing into their slots without a link"
    yield _row(budget, tally, "left", "slots are kept until their engine is dead, then given back", n["kills"], left)


def _calls(budget: Budget) -> Iterable[Row]:
    why_not = calls.why_not()
    for plans, promise, least in (
        (nth.KILLS, "a well killed at its N-th system call: the next one is right", 9),
        (nth.ERRORS, "a well whose N-th system call fails or lies goes on, or says why not", 2),
    ):
        if why_not:
            yield Row(promise, 0, 0, budget.seed, why_not)
            continue
        most = budget.of(least, 400)
        tally = spread(budget, "system calls", nth.lane(plans), len(plans) * most, most)
        n = tally.n
        seen = (
            f"calls, of {len(plans)} kinds, N up to {most} ({n['cut']} kinds have more); {n['refused']} wells did not "
            f"begin and said why; {n['right']:,} blocks compared, {n['wrong']} wrong"
        )
        yield _row(budget, tally, "broken", promise, n["hit"], seen, "wrong")
    yield _nth_engines(budget, why_not)


def _nth_engines(budget: Budget, why_not: str) -> Row:
    promise = "an engine killed at its N-th system call: others are right, nothing is held for it"
    if why_not:
        return Row(promise, 0, 0, budget.seed, why_not)
    kinds, most = len(nth_engines.CALLS), budget.of(6, 400)
    tally = spread(budget, "system calls of engines", nth_engines.kills, kinds * most, most)
    n = tally.n
    seen = (
        f"kills, at calls of {kinds} kinds ({n['cut']} kinds have more); {n['right']:,} blocks compared beside and "
        f"after them, {n['theirs']:,} of those spilled by engines that were killed"
    )
    return _row(budget, tally, "left", promise, n["kills"], seen, "wrong")


def _starved(budget: Budget) -> Iterable[Row]:
    yield from _if(
        budget, "a well that may open no more files goes on", starved.files_why_not(), starved.files, 10, 500
    )
    promise = "a well keeps to its memory, and one that the kernel kills for it is a miss"
    yield from _if(budget, promise, memory.why_not(), starved.limited_memory, 2, 40)
    yield from _if(budget, "a directory has one well, and none after a kill", "", starved.two_wells, 10, 500)


def _if(budget: Budget, promise: str, why_not: str, lane: Lane, ci: int, full: int) -> Iterable[Row]:
    """A row of the kind that needs something of the machine."""
    if why_not:
        yield Row(promise, 0, 0, budget.seed, why_not)
        return
    cases = budget.of(ci, full)
    tally = spread(budget, promise, lane, cases, -(-cases // budget.processes))
    told = {
        "meanwhile": "while it lasted",
        "killed": "killed by the kernel",
        "most_mib": "MiB beside the arena at most",
    }
    told |= {"most_ms": "ms from a kill to a well that serves, at most"}
    more = "".join(f", {tally.n[name]:,} {text}" for name, text in told.items() if name in tally.n)
    yield _row(budget, tally, "broken", promise, tally.n["cases"], f"{tally.n['right']:,} blocks right{more}", "wrong")


def _row(budget: Budget, tally: Tally, kind: str, promise: str, cases: int, remark: str, *also: str) -> Row:
    kinds = (kind, *also)
    told = [text for name in kinds for text in tally.evidence[name]]
    return Row(promise, cases, sum(tally.n[name] for name in kinds), budget.seed, remark, told)
