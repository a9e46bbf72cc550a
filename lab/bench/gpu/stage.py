"""What all measurements share: how large they are, how much time is left, and processor time of this process."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

from lab.bench.gpu.engine.model import LLAMA_8B, TINY, Config


@dataclass(frozen=True, slots=True)
class Stage:
    """`tiny`: on CPU, to show that the code works. `deadline`, of `time.monotonic`: what is not begun by then is
    skipped, and said to be."""

    device: str
    quick: bool
    deadline: float

    @property
    def tiny(self) -> bool:
        return self.device == "cpu"

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.deadline

    @property
    def model(self) -> Config:
        return TINY if self.tiny else LLAMA_8B

    @property
    def dtype(self) -> str:
        return "float32" if self.tiny else "bfloat16"

    @property
    def block_tokens(self) -> int:
        """0: as stepwell chooses; for the tiny shape a prompt would not fill a block then."""
        return 64 if self.tiny else 0

    def part(self, share: float) -> Stage:
        """The next so much of the time that is left."""
        now = time.monotonic()
        return Stage(self.device, self.quick, now + share * max(0.0, self.deadline - now))

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if not self.tiny:
            torch.cuda.synchronize()

    def free_bytes(self) -> int:
        """Of the GPU's memory."""
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])


SKIPPED = "skipped: the time was used up"


class Lap:
    """Seconds of work on the device between two points, read when it is over."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._began = self._mark()

    def _mark(self) -> Any:
        if self._stage.tiny:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> float:
        """Until now. Waits for it."""
        ended = self._mark()
        if self._stage.tiny:
            return float(ended - self._began)
        ended.synchronize()
        return float(self._began.elapsed_time(ended)) / 1e3


def threads_seconds(prefix: str = "stepwell") -> float:
    """Processor time of this process's threads of these names so far; of those that still live."""
    spent = 0.0
    for thread in threading.enumerate():
        if thread.name.startswith(prefix) and thread.ident is not None:
            spent += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return spent
