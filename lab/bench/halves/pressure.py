"""Pretended engines that use a well at a set rate: `python -m lab.bench.halves.pressure`, with one JSON job on standard
input.

Each engine is a thread with both members of a session, over the well's real socket, and no model. A prompt is a chain
of digests; what lies in its slots is never written. All engines begin on one clock: operation k of an engine is due k
periods after the start, late or not, so that a well that falls behind is seen to (an open loop). A rate of 0 is a
closed loop: the next operation begins when the last one has ended.

At the end of each window it notes what was done in it and the processor time that the well took for it meanwhile, all
of it and that of the thread that answers. One JSON line for each window is printed.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from lab.bench.halves.load import Members
from lab.bench.processes import cpu_seconds
from lab.bench.wells import PATIENCE_S, process
from lab.rig.well import eventually
from stepwell.client.questions import PrefixQuestion
from stepwell.client.scheduler import MAX_RESERVED

DIGEST_BYTES = 32
_STEP_S = 1e-3
_LOOK_S = 50e-6
"""Between two looks for the answer to a reservation: an engine looks once a step."""


class Job(msgspec.Struct, frozen=True):
    """`operation`: a key of OPERATIONS. `blocks`: of a prompt. `rate`: operations a second of each engine, 0 for as
    many as are answered. `prompts`: different ones of each engine, made resident before the first window."""

    home: str
    operation: str
    blocks: int
    engines: int = 1
    rate: float = 0.0
    prompts: int = 1
    windows: int = 8
    window_s: float = 0.5
    block_tokens: int = 128


class Window(msgspec.Struct, frozen=True):
    """`blocks`: that the well has answered. `cpu_s`: processor seconds of the well; `loop_s`: those of its thread that
    answers. `late_s`: how long after they were due operations had ended, the median of them. `took_s`: how long they
    took by themselves, the median, and `slowest_s` one in a hundred."""

    seconds: float
    operations: int
    blocks: int
    incomplete: int
    cpu_s: float
    loop_s: float
    late_s: float
    took_s: float
    slowest_s: float


@dataclass(slots=True)
class Done:
    """What one engine has done since the last window. Its thread adds, the main one takes."""

    blocks: list[int] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    incomplete: int = 0


class Engine(threading.Thread):
    """One session. `prepare` has made what it asks for resident."""

    def __init__(self, job: Job, number: int) -> None:
        super().__init__(name=f"pressure-{number}", daemon=True)
        self.done = Done()
        self.ending = threading.Event()
        self._job = job
        self._members = Members(Path(job.home), block_tokens=job.block_tokens)
        self._operation = OPERATIONS[job.operation]
        self._prompts = [os.urandom(DIGEST_BYTES * job.blocks) for _ in range(job.prompts)]
        self._order = 0

    def prepare(self) -> None:
        for prompt in self._prompts if self._job.operation in RESIDENT else ():
            self._members.fill(prompt)

    def run(self) -> None:
        period = 1 / self._job.rate if self._job.rate else 0.0
        due = time.perf_counter()
        while not self.ending.wait(max(0.0, due - time.perf_counter()) if period else 0.0):
            began = time.perf_counter()
            answered = self._operation(self._members, self._prompts[self._order % len(self._prompts)], self._order)
            self._order += 1
            self.done.blocks.append(answered)
            ended = time.perf_counter()
            self.done.took_s.append(ended - began)
            self.done.late_s.append(ended - (due if period else began))
            self.done.incomplete += answered < self._job.blocks
            due += period

    def close(self) -> None:
        self._members.close()


def lookup(members: Members, prompt: bytes, order: int) -> int:
    """A request that asks, is told all of its run, and lets go of it."""
    ask = _asked(members, prompt, order)
    members.scheduler.release(ask)
    return ask.blocks


def hurried(members: Members, prompt: bytes, order: int) -> int:
    """As `lookup`, but it waits no longer than an engine does, which looks once a step: what it was not told by then is
    a miss."""
    ask = members.scheduler.ask(prompt, 0, order)
    assert ask is not None, "the session has ended"
    while not members.scheduler.settle(ask, 0.0):
        time.sleep(_STEP_S)
    members.scheduler.release(ask)
    return ask.blocks


def miss(members: Members, prompt: bytes, order: int) -> int:
    """A request whose first block is cached nowhere."""
    lookup(members, os.urandom(len(prompt)), order)
    return len(prompt) // DIGEST_BYTES


def recall(members: Members, prompt: bytes, order: int) -> int:
    """As `lookup`, and all blocks are leased, and the leases ended as after a copy."""
    ask = _asked(members, prompt, order)
    if blocks := members.scheduler.offer(ask):
        session = ask.session
        transfer, _ = members.scheduler.recall(ask, 0, blocks)
        members.worker.recalled(session, [transfer])
    else:
        members.scheduler.release(ask)
    return blocks


def spill(members: Members, prompt: bytes, order: int) -> int:
    """New blocks, reserved and acknowledged as written, as many at a time as one message may name."""
    fresh, granted = os.urandom(len(prompt)), 0
    for at in range(0, len(fresh), DIGEST_BYTES * MAX_RESERVED):
        parent = fresh[max(0, at - DIGEST_BYTES) : at]
        reserved = members.reserve(fresh[at : at + DIGEST_BYTES * MAX_RESERVED], parent, poll_s=_LOOK_S)
        members.acknowledge(reserved)
        granted += sum(map(bool, reserved.leases))
    return granted


def _asked(members: Members, prompt: bytes, order: int) -> PrefixQuestion:
    """With its whole answer."""
    ask = members.scheduler.ask(prompt, 0, order)
    assert ask is not None, "the session has ended"
    eventually(partial(members.scheduler.settle, ask, PATIENCE_S), "an ask is answered")
    return ask


OPERATIONS: dict[str, Callable[[Members, bytes, int], int]] = {
    "lookup": lookup,
    "hurried": hurried,
    "miss": miss,
    "recall": recall,
    "spill": spill,
}
RESIDENT = ("lookup", "hurried", "recall")


def on_cpu(process: int) -> tuple[float, float]:
    """Seconds on a processor of all threads of this process, and of its first one."""
    first = Path(f"/proc/{process}/task/{process}/schedstat")
    return cpu_seconds([process])[process], int(first.read_text().split()[0]) / 1e9


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    well = process(Path(job.home))
    engines = [Engine(job, number) for number in range(job.engines)]
    for engine in engines:
        engine.prepare()
    print("ready", flush=True)
    sys.stdin.readline()
    for engine in engines:
        engine.start()
    at, (cpu_s, loop_s) = time.perf_counter(), on_cpu(well)
    for _ in range(job.windows):
        time.sleep(max(0.0, at + job.window_s - time.perf_counter()))
        done, now, (cpu_now, loop_now) = [engine.done for engine in engines], time.perf_counter(), on_cpu(well)
        for engine in engines:
            engine.done = Done()
        late = sorted(seconds for each in done for seconds in each.late_s)
        took = sorted(seconds for each in done for seconds in each.took_s)
        window = Window(
            now - at,
            len(late),
            sum(sum(each.blocks) for each in done),
            sum(each.incomplete for each in done),
            cpu_now - cpu_s,
            loop_now - loop_s,
            late[len(late) // 2] if late else 0.0,
            took[len(took) // 2] if took else 0.0,
            took[len(took) * 99 // 100] if took else 0.0,
        )
        print(msgspec.json.encode(window).decode(), flush=True)
        at, cpu_s, loop_s = now, cpu_now, loop_now
    for engine in engines:
        engine.ending.set()
    for engine in engines:
        engine.join(PATIENCE_S)
        engine.close()


if __name__ == "__main__":
    main()
