"""Wells that may open no more files, have no more memory, or find another well on their directory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from lab.rig.well import until
from lab.trust.budget import Budget
from lab.trust.kills import memory
from lab.trust.kills.engine import Chain, Engine
from lab.trust.kills.ground import Ground, ground
from lab.trust.kills.lanes import Tally
from lab.trust.kills.nth.calls import limit_files, open_files
from lab.trust.kills.processes import PATIENCE_S, ForkServer, Life, Wishes, executed
from lab.trust.kills.work import joined, recall, recovered, stats, stored

MODEL, BLOCKS = "one", 16
_MIB = 1 << 20
_MOST_FILES = 1024
_TRY_S = 0.25
BESIDE_HOST_MIB = 128
"""Of memory that a well needs at most beside its arena: the interpreter and its libraries, buffers, and indexes."""


def files_why_not() -> str:
    return "" if os.geteuid() == 0 else "only root may count the files of a well, which hides them"


def files(budget: Budget, number: int, cases: int) -> Tally:
    """A lane of wells that may open only a few more files for a while. Counts: `cases`, blocks that were `right`, in
    all and `meanwhile`. Violations: `wrong` blocks; `broken` wells, which end or do not come back."""
    tally, dice = Tally(), budget.dice("kills", "files", number)
    with ground() as place, ForkServer(place) as server:
        chains = [Chain(n, BLOCKS) for n in range(4)]
        with _serving(place, server.well(place.home, _wishes(place)), 16 << 10) as engine:
            _keep(place, engine, chains)
        for case in range(cases):
            if budget.over:
                break
            life = server.well(place.home, _wishes(place))
            with _serving(place, life, 16 << 10) as engine:
                new = [Chain(1000 * (case + 1) + n, BLOCKS) for n in range(2)]
                limit_files(life.pid, open_files(life.pid) + dice.randrange(4))
                with Engine(place.home, MODEL, 16 << 10) as other:
                    tally.n["meanwhile"] += sum(recall(engine, chain, tally, 2.0) for chain in chains[-4:])
                    for chain in new:
                        engine.spill(chain)
                        tally.n["meanwhile"] += recall(engine, chain, tally, 2.0)
                    with contextlib.suppress(ProcessLookupError):  # it has ended, which is found below
                        limit_files(life.pid, _MOST_FILES)
                    again = _comes_back(place, engine, 1000 * (case + 1) + 2) if _joins(other, life) else None
                if again is None or recall(engine, again, tally) != BLOCKS:
                    tally.violated("broken", f"after EMFILE: {stats(place.home)} {place.said(500)}")
                else:
                    chains.append(again)
            tally.n["cases"] += 1
    return tally


def _joins(engine: Engine, life: Life) -> bool:
    """For good: what it began while the well had no descriptors may be lost once more before."""
    return until(lambda: engine.joined(0.05) or not life.alive(), PATIENCE_S) and life.alive()


def _comes_back(place: Ground, engine: Engine, first: int) -> Chain | None:
    """A chain that is stored: in a while, since a disk that could not be written is left alone for some seconds."""
    before = 0
    for number in range(first, first + 50):
        filled = engine.spill(Chain(number, BLOCKS))
        time.sleep(_TRY_S)
        now = stored(place.home)
        if filled == BLOCKS and now >= before + BLOCKS:
            return Chain(number, BLOCKS)
        before = max(before, now)
    return None


def limited_memory(budget: Budget, number: int, cases: int) -> Tally:
    """A lane of wells that work in a group with just enough memory, and are then left without. Counts: `cases`, of them
    `killed` by the kernel, `right` blocks, and the `most_mib` that a well has used beside its arena. Violations:
    `wrong` blocks; `broken` wells, which needed more or did not begin again."""
    tally = Tally()
    for _ in range(cases):
        if budget.over:
            break
        with ground() as place, memory.group() as group:
            chains = [Chain(n, BLOCKS) for n in range(40)]  # 160 MiB, more than the arena has
            with executed(place, _wishes(place, host_mib=128)) as life:
                group.add(life.pid)
                group.allow((128 + BESIDE_HOST_MIB) * _MIB)
                with _serving(place, life, 256 << 10) as engine:
                    for chain in chains:
                        engine.spill(chain)
                        recall(engine, chain, tally)
                    most = group.most_bytes() // _MIB - 128
                    if not life.alive() or not until(lambda: stored(place.home) > 0):
                        tally.violated("broken", f"it needs more than {BESIDE_HOST_MIB} MiB beside its arena")
            tally.n["most_mib"] = max(tally.n["most_mib"], most)
            _starve(place, group, chains, tally)
            tally.n["cases"] += 1
    return tally


def _starve(place: Ground, group: memory.Group, chains: list[Chain], tally: Tally) -> None:
    """A well that wants to make a slab and has no memory for it; then one that has it."""
    group.allow(1 << 40)
    wishes = _wishes(place, host_mib=128)
    with executed(place, wishes) as life:
        group.add(life.pid)
        with _serving(place, life, 256 << 10) as engine:
            group.allow(group.used_bytes() + 4 * _MIB)
            for chain in chains:
                if life.alive() and not engine.lost:
                    recall(engine, chain, tally, 1.0)
                    engine.spill(Chain(chain.number + 1000, BLOCKS))
        tally.n["killed"] += not life.alive()
    group.allow(1 << 40)
    with executed(place, wishes) as life, _serving(place, life, 256 << 10) as engine:
        if sum(recall(engine, chain, tally) for chain in chains) == 0:
            tally.violated("broken", f"nothing is there after a well ran out of memory: {place.said(500)}")


def two_wells(budget: Budget, number: int, cases: int) -> Tally:
    """A lane of pairs of wells: on one disk, and of one home. Counts: `cases`, blocks that were `right`, and the
    `most_ms` until a directory is free after a kill. Violations: `wrong` blocks; `broken`: not refused, or not free."""
    tally = Tally()
    with ground() as place, ForkServer(place) as first, ForkServer(place) as second:
        chain = Chain(0, BLOCKS)
        with _serving(place, first.well(place.home, _wishes(place)), 16 << 10) as engine:
            _keep(place, engine, [chain])
        for _ in range(cases):
            if budget.over:
                break
            with _serving(place, life := first.well(place.home, _wishes(place)), 16 << 10) as engine:
                for home, code in ((place.folder / "other", "SW-506"), (place.home, "SW-501")):
                    ended = second.well(home, _wishes(place)).wait()
                    if ended.refused != code:
                        tally.violated("broken", f"a second well was not refused with {code}: {ended}")
                    if recall(engine, chain, tally) != BLOCKS:
                        tally.violated("broken", "the first well was disturbed by the second")
                life.kill()
                life.wait()
            began = time.monotonic()
            with _serving(place, second.well(place.home, _wishes(place)), 16 << 10) as engine:
                tally.n["most_ms"] = max(tally.n["most_ms"], round(1000 * (time.monotonic() - began)))
                if recall(engine, chain, tally) != BLOCKS:
                    tally.violated("broken", "what the killed well had stored is not there")
            tally.n["cases"] += 1
    return tally


def _wishes(place: Ground, host_mib: int = 64) -> Wishes:
    return {"host": f"{host_mib}MiB", "disk": f"{place.disk}:256MiB", "disk_reserve": "1MiB"}


@contextlib.contextmanager
def _serving(place: Ground, life: Life, shard_bytes: int) -> Iterator[Engine]:
    """An engine of the well; both are gone at the end, the well by SIGKILL. Raises TimeoutError where none serves."""
    try:
        if not life.ready():
            raise TimeoutError(f"a well did not begin: {life.wait()} {place.said()}")
        with Engine(place.home, MODEL, shard_bytes) as engine:
            if not (joined(engine, life) and recovered(place.home, life)):
                raise TimeoutError(f"a well does not answer: {place.said()}")
            yield engine
    finally:
        life.kill()
        life.wait()


def _keep(place: Ground, engine: Engine, chains: list[Chain]) -> None:
    filled = sum(engine.spill(chain) for chain in chains)
    if not until(lambda: stored(place.home) == filled, PATIENCE_S):
        raise TimeoutError(f"blocks are not stored: {stats(place.home)}")
