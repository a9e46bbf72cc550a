"""The two that the same is done to: vLLM's own filesystem tier, and stepwell's in its place below vLLM's offloading."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from lab.bench import storage
from lab.bench.compared import systems
from lab.bench.compared.systems import VLLM_FS, Memory
from lab.rig.well import eventually, until
from lab.trust.engine.well import TestedWell
from lab.trust.peer.harm import Harm
from stepwell.client import control
from stepwell.demo.engine import EngineConfig, EngineProcess

PAGE = 32
_SHAPE: dict[str, Any] = {"page": PAGE, "pool_pages": 20, "max_model_len": 352}
_ABOVE = Memory(24 << 20, 24 << 20)
"""vLLM's host memory: about as much as two prompts have, so that whatever is asked for again comes from below it."""

_COUNTED = {
    "disk_recalled_blocks": "blocks read",
    "disk_not_recalled_": "blocks refused",
    "disk_spilled_blocks": "blocks written",
}


class Subject:
    """One of them, with its engine once that is started."""

    who: ClassVar[str]
    files: ClassVar[str]
    ours: ClassVar[bool]

    def __init__(self, place: TestedWell, model: Path, disk: Path, connector: Any) -> None:
        self.place, self.disk = place, disk
        env = {**place.env(), "PYTHONPATH": systems.python_path()}
        self._config = EngineConfig(model, connector=connector, dtype="float32", env=env, **_SHAPE)
        self._running: EngineProcess | None = None
        self._shared: set[Path] = set()

    @property
    def engine(self) -> EngineProcess:
        assert self._running is not None
        return self._running

    def start(self) -> None:
        """Raises EngineFailed, TimeoutError."""
        self._running = EngineProcess.start(self._config, self.place.folder / f"{self.files[2:]}.log")
        self._shared = storage.shared_files(self.engine.pids())

    def close(self) -> None:
        """Kills it. Quiet if there is none."""
        if self._running is not None:
            self._running.kill()
        storage.remove_left(self._shared)

    def befall(self, harm: Harm, dice: Random) -> None:
        """Everything is written, and then this happens."""
        self.settle()
        if harm.killed == "both":
            self.close()
        if harm.killed:
            self.kill()
        if harm.killed == "both":  # only an engine that has started a well starts it again
            self.start()
        harm.damage(sorted(self.disk.rglob(self.files)), dice)
        self.joined()
        if self.place.faulty is not None:
            self.place.faulty.set(*harm.rules)

    def heal(self) -> int:
        """How often the disk's rules took effect, which end."""
        if self.place.faulty is None:
            return 0
        hits = sum(self.place.faulty.report().hits)
        self.place.faulty.heal()
        return hits

    def settle(self) -> None:
        """Everything is written, and what is asked for next comes from there."""
        raise NotImplementedError

    def mend(self) -> None:
        """All that was asked for is stored as it should be."""
        raise NotImplementedError

    def kill(self) -> None:
        """The well, if there is one."""

    def joined(self) -> None:
        """A well serves the engine, if it has any. Raises TimeoutError."""

    def blocks(self) -> Counter[str]:
        """What the present well has done with blocks."""
        return Counter()

    def held(self) -> str:
        """What a well still holds for somebody though nobody asks for anything."""
        return ""


class FsTier(Subject):
    who, files, ours = "vLLM's fs tier in an engine", "*.bin", False

    def __init__(self, place: TestedWell, model: Path) -> None:
        folder = place.folder if place.faulty is None else place.faulty.path
        system = systems.system(VLLM_FS, folder, _ABOVE)
        assert system.disk is not None
        super().__init__(place, model, system.disk, system.connector)
        self._whole = place.folder / "whole"

    def settle(self) -> None:
        storage.wait_quiet(lambda: sum(path.stat().st_size for path in self.disk.rglob(self.files)))
        if not self._whole.exists():
            shutil.copytree(self.disk, self._whole)

    def mend(self) -> None:
        """Without what wrong answers have added."""
        self.settle()
        shutil.rmtree(self.disk)
        shutil.copytree(self._whole, self.disk)


class WellTier(Subject):
    """Nothing is put back: what was refused has been computed and stored again."""

    who, files, ours = "stepwell below vLLM's offloading in an engine", "*.seg", True

    def __init__(self, place: TestedWell, model: Path) -> None:
        super().__init__(place, model, place.disk, systems.tier_connector(place.home, _ABOVE, place.disk))

    def settle(self) -> None:
        if self._running is not None:
            self.mend()
            control.clear(self.place.home, ["host"])

    def mend(self) -> None:
        self.joined()
        eventually(lambda: self.place.stats().get("disk_write_queue_bytes") == 0, "everything is written")

    def kill(self) -> None:
        if pid := self.place.pid():
            self.place.kill()
            eventually(lambda: self.place.pid() != pid, "the well is gone")

    def blocks(self) -> Counter[str]:
        found = Counter[str]()
        for name, n in self.place.stats().items():
            for prefix, what in _COUNTED.items():
                found[what] += int(n) if name.startswith(prefix) else 0
        return found

    def held(self) -> str:
        until(lambda: not self.place.held(engines=1))
        return self.place.held(engines=1)

    def joined(self) -> None:
        def complete() -> bool:
            stats = self.place.stats()
            return stats.get("sessions_opened", 0) > stats.get("sessions_ended", 0)  # type: ignore[operator]

        eventually(complete, "a well serves the engine")
