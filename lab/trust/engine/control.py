"""A control: whether answers tell when one page of what is recalled is wrong.

Every stored block that a recall of one prompt brings gets the bytes of another one in turn, in the arena, behind the
well's back, and the prompt is asked for again. The answer has to be wrong each time: then one that is right says that
every page was.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab.rig.well import until
from lab.trust.engine.prompts import Prompt
from lab.trust.engine.well import HOST, TestedWell
from stepwell.block.layout import SlabLayout
from stepwell.client import control
from stepwell.demo.engine import EngineProcess
from stepwell.demo.wire import Answer, Question
from stepwell.units import parse_size

_TRIES = 20
_SLAB = "/memfd:stepwell-slab"


@dataclass(slots=True)
class Noticed:
    """`cases`: wrong pages that were recalled. `unnoticed`: where an answer was right nevertheless. `untried`: where
    the control was not possible, and why."""

    cases: int = 0
    unnoticed: list[str] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)


def try_each(
    engine: EngineProcess, well: TestedWell, prompts: Sequence[Prompt], block: int, name: str, found: Noticed
) -> None:
    """`block`: tokens of one. Nothing else may be asked meanwhile. Raises TimeoutError where nothing is recalled."""
    _recalled(engine, prompts[0], block, "control")
    try:
        arena = _Arena(engine, well)
        before = arena.slots
    except PermissionError as error:
        found.untried.append(f"not tried for {name}: {error}")
        return
    for number, prompt in enumerate(prompts):
        salt = f"control {number}"
        _recalled(engine, prompt, block, salt)
        counted = _recalled_blocks(well)
        right = _recalled(engine, prompt, block, salt)
        blocks = _recalled_blocks(well) - counted
        slots = arena.slots
        mine = [at for at, content in slots.items() if before.get(at) != content]
        noticed = 0
        for at, other in zip(mine, [*mine[1:], mine[0]], strict=True):
            arena.write(at, slots[other])
            noticed += bool(prompt.wrong(_recalled(engine, prompt, block, salt), len(prompt.answer)))
            arena.write(at, slots[at])
        found.cases += blocks
        if noticed != blocks:
            found.unnoticed.append(f"{name}: of {blocks} blocks that are recalled {noticed} were noticed")
        if wrong := prompt.wrong(right, len(prompt.answer)):
            found.unnoticed.append(f"{name}: nothing was wrong, and yet {wrong}")
        before = slots


def _recalled(engine: EngineProcess, prompt: Prompt, block: int, salt: str) -> Answer:
    """An engine does not wait for a well that cannot keep its limits, as on a busy machine: then it is asked again."""
    question = Question(list(prompt.tokens), len(prompt.answer), salt, {"logprobs": 0})
    for _ in range(_TRIES):
        engine.reset_prefix_cache()
        answer = engine.ask_all([question])[0]
        if answer.external_tokens == (len(prompt.tokens) - 1) // block * block:
            return answer
        time.sleep(0.05)
    raise TimeoutError(f"not recalled in {_TRIES} attempts")


def _recalled_blocks(well: TestedWell) -> int:
    """When nothing is under way."""
    until(lambda: not well.held(engines=1), poll_s=0.05)
    return int(well.stats()["recalled_blocks"])


class _Arena:
    """The well's slots in host memory, by their address in the engine's process."""

    def __init__(self, engine: EngineProcess, well: TestedWell) -> None:
        (row,) = control.namespaces(well.home)
        self._layout = SlabLayout.within(parse_size(HOST), row.nbytes // row.blocks)
        self._pid, *_ = (pid for pid in engine.pids() if _SLAB in _maps(pid))
        self._memory = Path(f"/proc/{self._pid}/mem")

    @property
    def slots(self) -> dict[int, bytes]:
        """Of all slabs that the engine has now."""
        layout, found = self._layout, {}
        with self._memory.open("rb", buffering=0) as memory:
            for line in _maps(self._pid).splitlines():
                start, end = (int(side, 16) for side in line.split()[0].split("-"))
                if _SLAB in line and end - start == layout.nbytes:
                    for at in range(start + layout.offset, end, layout.stride):
                        memory.seek(at)
                        found[at] = memory.read(layout.slot_bytes)
        return found

    def write(self, at: int, content: bytes) -> None:
        with self._memory.open("r+b", buffering=0) as memory:
            memory.seek(at)
            memory.write(content)


def _maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
