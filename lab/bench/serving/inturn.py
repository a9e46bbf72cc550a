"""The same prompts, one after the other, to engines that differ in their well's policy alone.

Each engine has a well of its own, without a disk tier, and forgets its own prefix cache after each prompt: what is hit
has been recalled. The engines take turns with each prompt, in an order that alternates, and who is not asked is halted,
so that what else the machine does meets all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from lab.bench import processes
from lab.bench.serving.engines import Bench, Shape
from lab.bench.wells import PATIENCE_S
from lab.rig.well import eventually
from stepwell.block.layout import SlabLayout
from stepwell.client import control
from stepwell.config.settings import MIN_HOST_BYTES
from stepwell.demo.engine import EngineProcess
from stepwell.demo.model import kv_bytes_per_token, read_config
from stepwell.demo.well import MIB, DemoWell

_PAUSE_S = 0.05  # for what is done behind the first token
_RECALLS = ("decided_", "gave_up_", "missed_too_slow")
"""How figures of the well begin that tell of recalls."""


@dataclass(frozen=True, slots=True)
class First:
    """One prompt, to its first token. `at`: when it was asked, in seconds from anywhere. `cpu_s`: processor time of all
    processes of the engine and of its well; None if one came or went."""

    at: float
    tokens: int
    hit: int
    wall_s: float
    cpu_s: float | None


@dataclass(frozen=True, slots=True)
class Asked:
    """Of one policy: a sample for each prompt, in their order, how many blocks its host tier had room for, and how many
    recalls were decided, by why, and were given up or came too late."""

    firsts: list[First]
    slots: int
    recalls: dict[str, int]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Of the model at this engine page, in its layout in host memory."""

    tokens: int
    token_bytes: int

    @property
    def nbytes(self) -> int:
        return self.tokens * self.token_bytes

    def host_bytes(self, slots: int) -> int:
        """The largest host tier of whole MiB that has room for at most so many blocks. Raises ValueError if no well is
        that small."""
        found = slots * self.nbytes // MIB * MIB
        while self.slots_of(found) > slots:
            found -= MIB
        if found < MIN_HOST_BYTES:
            raise ValueError(f"no host tier is so small that it has room for {slots} blocks only")
        return found

    def slots_of(self, host_bytes: int) -> int:
        """Blocks that a host tier of this size has room for."""
        slab = SlabLayout.within(host_bytes, self.nbytes)
        return host_bytes // slab.nbytes * slab.slots


def blocks_of(bench: Bench, page: int) -> Blocks:
    """Blocks of a page each, of the bench's model. Raises ValueError if its configuration does not tell."""
    token_bytes = kv_bytes_per_token(read_config(bench.model))
    if token_bytes is None:
        raise ValueError("the model's configuration does not tell the size of its KV")
    return Blocks(page, token_bytes)


def ask_all(
    bench: Bench, policies: Sequence[str], host_bytes: int, shape: Shape, prompts: Sequence[list[int]], label: str
) -> dict[str, Asked]:
    """Starts an engine and a well for each policy, asks all of them all prompts, and ends them. Raises EngineFailed,
    TimeoutError."""
    with ExitStack() as stack:
        rivals: list[_Rival] = []
        for policy in policies:
            home = bench.folder / label.replace(" ", "-") / policy / "home"
            well = DemoWell(home, host_bytes, settings={"canary": 0, "policy": policy, "block_tokens": shape.page})
            stack.callback(well.stop)
            engine = stack.enter_context(replace(bench, well=well).engine(f"{label}, {policy}", shape))
            rivals.append(_Rival(policy, engine, well))
        for rival in rivals:
            rival.forget()
            control.clear(rival.well.home, ["host"])
        with bench.progress.steps(label, len(prompts)) as step:
            _in_turn(rivals, prompts, step)
        return {rival.policy: rival.asked() for rival in rivals}


class _Rival:
    def __init__(self, policy: str, engine: EngineProcess, well: DemoWell) -> None:
        self.policy, self.engine, self.well = policy, engine, well
        self.firsts: list[First] = []

    def ask(self, prompt: list[int]) -> None:
        pids = [*self.engine.pids(), *([well] if (well := control.pid(self.well.home)) else [])]
        at, before = time.monotonic(), processes.cpu_seconds(pids)
        answer = self.engine.ask(prompt, 1)
        cpu_s = processes.spent_between(before, processes.cpu_seconds(pids))
        self.firsts.append(First(at, len(prompt), answer.cached_tokens, answer.ttft_s, cpu_s))
        self.forget()

    def forget(self) -> None:
        """Once its last blocks are spilled."""
        eventually(self.engine.reset_prefix_cache, "the engine forgets", PATIENCE_S)
        time.sleep(_PAUSE_S)

    def asked(self) -> Asked:
        stats = control.stats(self.well.home)
        recalls = {name: int(count) for name, count in stats.items() if name.startswith(_RECALLS)}
        return Asked(self.firsts, int(stats["blocks"]) + int(stats["free_slots"]), recalls)


def _in_turn(rivals: Sequence[_Rival], prompts: Sequence[list[int]], step: Callable[[str], None]) -> None:
    for number, prompt in enumerate(prompts):
        for rival in rivals[:: 1 if number % 2 else -1]:
            others = [pid for other in rivals if other is not rival for pid in other.engine.pids()]
            with processes.halted(others):
                rival.ask(prompt)
        step(", ".join(f"{rival.policy} hit {rival.firsts[-1].hit}" for rival in rivals) + f" of {len(prompt)} tokens")
