"""Rules for requests that go wrong, which can be exchanged at any moment."""

from __future__ import annotations

import errno
import random
import threading
from collections import deque
from collections.abc import Sequence
from fnmatch import fnmatchcase

import msgspec


class Rule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Requests that go wrong, and how.

    `op`: kind of the requests ("read", "write", "open", "create", "lookup", "getattr", "setattr", "unlink", "fsync",
    "fsyncdir", "readdir", "statfs", "fallocate", ..., "*": all). `name`: glob for the names of their files. `first`,
    `last`: they touch bytes from `first` on and before `last`. The first `skip` of them pass, then `times` go wrong (0:
    all), each with probability `chance`. The first of several rules that apply counts.

    The requests wait `delay` seconds, or `hang` until the rules are exchanged, and then go on as the other fields
    demand: a hang alone ends well. A hanging request gives up when its caller is killed, as on a network filesystem,
    unless it is `deaf`, as on a block device: then not even SIGKILL ends the caller before the hang ends.

    - errno: the request fails with it and does nothing.
    - short: this share of the bytes is read or written, and reported.
    - torn: this share is written, and all of it confirmed.
    - lose: nothing is written, and all confirmed.
    - flip: one bit of the bytes read or written is wrong.
    """

    op: str = "*"
    name: str = "*"
    first: int = 0
    last: int = 1 << 62
    skip: int = 0
    times: int = 0
    chance: float = 1.0
    delay: float = 0.0
    hang: bool = False
    deaf: bool = False
    errno: int = 0
    short: float = 1.0
    torn: float = 1.0
    lose: bool = False
    flip: bool = False


NO_FAULT = Rule()


class FuseReport(msgspec.Struct, frozen=True):
    """`hits`: how often each of the present rules has gone into effect. `hanging`: requests that hang right now."""

    hits: list[int]
    hanging: int


class _Wait:
    """One request that waits. `over` is set to end it."""

    def __init__(self, *, deaf: bool) -> None:
        self.over = threading.Event()
        self.deaf = deaf
        self.interrupted = False

    def interrupt(self) -> None:
        if not self.deaf:
            self.interrupted = True
            self.over.set()


class FuseFaults:
    """Present rules and waiting requests. Thread-safe."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._rules: Sequence[Rule] = ()
        self._seen: list[int] = []
        self._hits: list[int] = []
        self._waits: dict[int, _Wait] = {}
        self._early: deque[int] = deque(maxlen=64)  # were interrupted before they waited, or when they had ended

    def set(self, rules: Sequence[Rule]) -> None:
        """Replaces all rules; hanging requests go on."""
        with self._lock:
            self._rules, self._seen, self._hits = rules, [0] * len(rules), [0] * len(rules)
            for wait in self._waits.values():
                wait.over.set()

    def report(self) -> FuseReport:
        with self._lock:
            return FuseReport(list(self._hits), len(self._waits))

    def strike(self, request: int, op: str, name: str, offset: int = 0, nbytes: int = 1) -> Rule:
        """The rule for this request, after its wait. Raises OSError if the rule has an errno."""
        with self._lock:
            rule = self._choose(op, name, offset, nbytes)
            wait = None
            if rule.hang or rule.delay:
                wait = self._waits[request] = _Wait(deaf=rule.deaf)
                if request in self._early:
                    wait.interrupt()
        if wait is not None:
            wait.over.wait(None if rule.hang else rule.delay)
            with self._lock:
                del self._waits[request]
            if wait.interrupted:
                raise InterruptedError(errno.EINTR, "the caller was interrupted")
        if rule.errno:
            raise OSError(rule.errno, "as the rule says")
        return rule

    def _choose(self, op: str, name: str, offset: int, nbytes: int) -> Rule:
        for number, rule in enumerate(self._rules):
            if rule.op not in ("*", op) or not fnmatchcase(name, rule.name):
                continue
            if offset >= rule.last or offset + nbytes <= rule.first:
                continue
            self._seen[number] += 1
            if self._seen[number] <= rule.skip or (rule.times and self._hits[number] >= rule.times):
                continue
            if rule.chance < 1 and self._random.random() >= rule.chance:
                continue
            self._hits[number] += 1
            return rule
        return NO_FAULT

    def interrupt(self, request: int) -> None:
        """The caller of a request has received a signal. A request that does not wait ends soon anyway."""
        with self._lock:
            wait = self._waits.get(request)
            if wait is not None:
                wait.interrupt()
            else:
                self._early.append(request)

    def flip(self, data: memoryview) -> None:
        """Turns one bit over."""
        if len(data):
            with self._lock:
                bit = self._random.randrange(8 * len(data))
            data[bit // 8] ^= 1 << bit % 8
