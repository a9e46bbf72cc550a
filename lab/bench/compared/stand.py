"""One system under measurement: its engine and, where it has one, its well and its files."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from lab.bench import processes, storage
from lab.bench.compared.systems import System
from lab.bench.serving import engines
from lab.bench.serving.engines import Shape
from stepwell.client import control
from stepwell.demo.engine import EngineConfig, EngineProcess
from stepwell.demo.page_cache import drop_page_cache
from stepwell.demo.well import DemoWell
from stepwell.demo.wire import Answer

_PAUSE_S = 0.05
_WELL_END_S = 10.0


class Stand:
    """A system that runs. `close` ends all of it; the files below its folders stay. One thread may use it."""

    def __init__(self, system: System, model: Path, shape: Shape, log: Path) -> None:
        """Starts the engine and warms it up. Raises EngineFailed, TimeoutError, with nothing left running."""
        self.system = system
        self._shape = shape
        self._config = EngineConfig(
            model,
            shape.page,
            shape.pool_pages,
            shape.max_model_len,
            system.connector,
            env=system.env,
            extra=system.extra,
        )
        self.log = log
        self.shared_memory_left = 0
        """Bytes in named shared memory that killed engines left behind, and that were removed."""
        self.engine = self._start()

    def ask(self, prompt: Sequence[int], tokens: int) -> Answer:
        return self.engine.ask(list(prompt), tokens)

    def pids(self) -> list[int]:
        """Living processes: the engine's, and the well."""
        well = control.pid(self.system.home) if self.system.home is not None else None
        return [*self.engine.pids(), *([well] if well else [])]

    def ask_for_first(self, prompt: Sequence[int]) -> tuple[Answer, float | None]:
        """An answer of one token, and the CPU seconds that all processes spent on it; None if one came or went."""
        pids = self.pids()
        before = processes.cpu_seconds(pids)
        answer = self.ask(prompt, 1)
        return answer, processes.spent_between(before, processes.cpu_seconds(pids))

    def streams(self) -> tuple[int, int]:
        """Recalls that were offered while they were read, so far, by the well's account: those that came whole, and
        those that fell short, which vLLM counts as if they had come."""
        stats = control.stats(self.system.home) if self.system.home is not None else {}
        return int(stats.get("engine_whole_streams", 0)), int(stats.get("engine_short_streams", 0))

    def forget_page_cache(self) -> None:
        if self.system.disk is not None:
            drop_page_cache(self.system.disk)

    def settle(self) -> bool:
        """Waits for what is done behind the answers: writes to disk above all. False if they do not end."""
        time.sleep(_PAUSE_S)
        if self.system.disk is None:
            return True
        pids = self.pids()
        return storage.wait_quiet(lambda: storage.moved(pids).written)

    def kill_everything(self) -> None:
        """SIGKILL to engine and well; only files are left."""
        shared = storage.shared_files(self.engine.pids())
        self.engine.kill()
        home = self.system.home
        if home is not None and (well := control.pid(home)):
            os.kill(well, signal.SIGKILL)
            deadline = time.monotonic() + _WELL_END_S
            while control.pid(home) is not None:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the well, process {well}, is there {_WELL_END_S:.0f} s after SIGKILL")
                time.sleep(_PAUSE_S)
        self.shared_memory_left += storage.remove_left(shared)

    def start_again(self) -> None:
        """After `kill_everything`: a new engine, which starts a new well. Raises as the constructor does."""
        self.engine = self._start()

    def close(self) -> None:
        self.engine.close()
        if self.system.home is not None:
            DemoWell(self.system.home, 0).stop()

    def _start(self) -> EngineProcess:
        try:
            engine = EngineProcess.start(self._config, self.log)
            try:
                if self.system.connector is not None:
                    engines.warm_up(engine, self._shape.page)
            except BaseException:
                engine.kill()
                raise
        except BaseException:
            if self.system.home is not None:
                DemoWell(self.system.home, 0).stop()
            raise
        return engine
