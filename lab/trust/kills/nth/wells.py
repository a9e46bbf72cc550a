"""A well with a fixed little work, whose N-th call of a kind kills it, fails or lies; then the next life is asked."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from lab.rig.well import until
from lab.trust.budget import Budget
from lab.trust.kills.engine import Chain, Engine
from lab.trust.kills.ground import Ground, ground
from lab.trust.kills.lanes import Lane, Tally
from lab.trust.kills.nth.calls import hindered
from lab.trust.kills.processes import Ended, ForkServer, Life, Wishes
from lab.trust.kills.work import joined, recall, recovered, stats, stored
from stepwell.client import control
from stepwell.errors import StepwellError

MODEL, SHARD_BYTES, BLOCKS = "one", 16 << 10, 8
KILL = "signal=SIGKILL"
_JOIN_S, _STORE_S, _ANSWER_S = 3.0, 2.0, 10.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens to which call. `fresh`: in a home and on a disk of its own, which the life makes; else in its
    predecessors', from which it has to delete something."""

    call: str
    how: str
    fresh: bool = False


_IN_HOME = (
    "openat", "mkdir", "write", "fsync", "linkat", "rename", "unlink", "bind", "listen", "flock", "fallocate",
    "pwritev2",
)  # fmt: skip
_LATER = (
    "openat", "pwritev2", "preadv2", "unlink", "unlinkat", "ftruncate", "memfd_create", "madvise", "getdents64",
    "accept4", "recvmsg", "recvfrom", "sendmsg", "epoll_ctl", "epoll_wait",
)  # fmt: skip
_FRESH_ERRORS = {
    "openat": ("EIO", "EMFILE", "ENOSPC"),
    "mkdir": ("ENOSPC", "EROFS"),
    "write": ("EIO", "ENOSPC"),
    "fsync": ("EIO",),
    "linkat": ("EIO", "EPERM"),
    "rename": ("EIO", "ENOSPC"),
    "bind": ("EADDRINUSE",),
    "flock": ("ENOLCK", "EAGAIN"),
    "fallocate": ("EIO", "ENOSPC", "EOPNOTSUPP", "EINTR"),
    "fstatfs": ("EIO",),
    "clone3": ("EAGAIN",),
}
_LATER_ERRORS = {
    "openat": ("EIO", "EMFILE", "ENOENT"),
    "pwritev2": ("EIO", "ENOSPC", "EINTR"),
    "preadv2": ("EIO", "EINTR"),
    "unlink": ("EIO",),
    "unlinkat": ("EIO", "EPERM", "ENOENT"),
    "getdents64": ("EIO",),
    "ftruncate": ("EIO",),
    "memfd_create": ("EMFILE", "ENOMEM"),
    "madvise": ("ENOMEM", "EFAULT"),
    "accept4": ("EMFILE", "ECONNABORTED", "EINTR"),
    "recvmsg": ("ECONNRESET", "EAGAIN"),
    "recvfrom": ("ECONNRESET", "EAGAIN"),
    "sendmsg": ("EPIPE", "EAGAIN", "ENOBUFS", "ETOOMANYREFS"),
    "epoll_ctl": ("ENOMEM", "ENOSPC"),
    "epoll_wait": ("EINTR",),
}
_LIES = {"pwritev2": (0, 512, 4096), "preadv2": (0, 512, 4096)}
"""What a call returns that is not made: a short one, or one of a page that has done nothing."""

KILLS: Sequence[Plan] = (
    *(Plan(call, KILL, fresh=True) for call in _IN_HOME),
    *(Plan(call, KILL) for call in _LATER),
)
ERRORS: Sequence[Plan] = (
    *(Plan(call, f"error={e}", fresh=True) for call, errors in _FRESH_ERRORS.items() for e in errors),
    *(Plan(call, f"error={e}") for call, errors in _LATER_ERRORS.items() for e in errors),
    *(Plan(call, f"retval={n}") for call, lies in _LIES.items() for n in lies),
)


def lane(plans: Sequence[Plan]) -> Lane:
    """One plan: the first, the second, and so on to the last call or the bound."""
    return partial(_lane, plans)


def _lane(plans: Sequence[Plan], budget: Budget, number: int, most: int) -> Tally:
    with ground() as place, ForkServer(place) as server:
        nth = Nth(place, server, plans[number])
        for n in range(1, most + 1):
            if budget.over or not nth.one(n):
                break
        else:
            nth.tally.n["cut"] += 1
        return nth.tally


@dataclass(slots=True)
class Nth:
    """Counts: `hit` lives, of them `refused` to begin; `right` blocks; plans that were `cut` at the bound. Violations:
    `wrong` blocks; `broken` lives, which end by themselves without a word or do not answer."""

    place: Ground
    server: ForkServer
    plan: Plan
    tally: Tally = field(default_factory=Tally)
    _last: int = 0
    _stored: list[Chain] = field(default_factory=list)

    def one(self, n: int) -> bool:
        """False: there was no N-th call, and nothing was hindered; then the life ends as asked."""
        place = self.place
        if self.plan.fresh:
            home = place.folder / f"home{n}"
            place = replace(place, home=home, disk=place.disk.with_name(f"disk{n}"))
            self._stored = []
        else:
            while self._last < 6:  # more segments than the hindered life may have
                self._check(place)
        hit = self._hinder(place, n)
        self._check(place)
        if self.plan.fresh:
            place.clear()
        return hit

    def _wishes(self, place: Ground, mib: int) -> Wishes:
        return {"host": "64MiB", "disk": f"{place.disk}:{mib}MiB", "disk_reserve": "1MiB", "disk_threads": 1}

    def _hinder(self, place: Ground, n: int) -> bool:
        life = self.server.well(place.home, self._wishes(place, 64), held=True)
        with hindered(life.pid, place.folder / "strace", f"?{self.plan.call}", self.plan.how, n) as by:
            life.go()
            try:
                if life.ready():
                    self._work(place, life)
                    self._stop(place, life)
                ended = life.wait()
            except TimeoutError:
                life.kill()
                ended = replace(life.wait(), what="it hung")
        killed = self.plan.how == KILL and ended == Ended(-9)
        hit = bool(by.hits or killed)
        self.tally.n["hit"] += hit
        self.tally.n["refused"] += bool(ended.refused)
        if not (killed or ended == Ended(0) or (hit and ended.refused)):
            self._broken(n, f"{'' if hit else 'not hindered at all: '}{ended} {place.said()}")
        return hit

    @staticmethod
    def _stop(place: Ground, life: Life) -> None:
        try:
            control.stop(place.home)
        except StepwellError:  # what it answered may have been hindered
            life.kill(signal.SIGTERM)

    def _check(self, place: Ground) -> None:
        """A life that nobody hinders, with more room; its death is sudden."""
        life = self.server.well(place.home, self._wishes(place, 512))
        try:
            if not life.ready():
                self._broken(0, f"the next life does not begin: {life.wait()} {place.said()}")
                return
            if not self._work(place, life):
                self._broken(0, f"the next life does not serve: {place.said()}")
            for stray in place.strays():
                self._broken(0, f"{stray} was left behind")
        finally:
            life.kill()
            life.wait()

    def _work(self, place: Ground, life: Life) -> bool:
        """Recalls what is stored, spills a chain, waits until it is stored; True if it was. Then it is asked whether it
        still answers."""
        with Engine(place.home, MODEL, SHARD_BYTES) as engine:
            if joined(engine, life, _JOIN_S):
                recovered(place.home, life, _STORE_S)
                for chain in self._stored[-2:]:
                    recall(engine, chain, self.tally, _STORE_S)
                self._last += 1
                chain = Chain(self._last, BLOCKS)
                filled = engine.spill(chain)
                kept = until(lambda: stored(place.home) >= BLOCKS or not life.alive(), _STORE_S) and life.alive()
                recall(engine, chain, self.tally, _STORE_S)
                self._stored.append(chain)
                return filled == BLOCKS and kept
        if life.alive() and not until(lambda: bool(stats(place.home)) or not life.alive(), _ANSWER_S):
            self._broken(0, f"it does not answer: {place.said()}")
        return False

    def _broken(self, n: int, what: str) -> None:
        at = f"{self.plan.call} {n} {self.plan.how}" if n else f"after {self.plan.call} {self.plan.how}"
        self.tally.violated("broken", f"{at}: {' '.join(what.split())[-600:]}")
