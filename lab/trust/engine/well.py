"""The well under test: in a process of its own, with the least host memory there can be and a disk tier that may fail.

Everything that it and its engines write lies in one folder, so that what they leave behind can be seen.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.rig.left import processes
from stepwell.client import control
from stepwell.engines.vllm.plugin import NAME
from stepwell.errors import BackendDown, StepwellError
from stepwell.testing.fuse import FaultyDisk, why_not

HOST, DISK, PAGE = "64MiB", "512MiB", 32
"""Sizes of the tiers, and tokens of an engine's page, which are a block's, too."""

BOOKS = ("pinned_bytes", "leased_blocks", "filling", "quarantined_slots")
"""What is held for somebody: nothing, when nobody asks for anything."""

_KEPT = {"keyring", "README.txt", "stepwell.log", "fingerprints.json", "disks.json", "costs.json", "well.lock"}

Stats = dict[str, int | float | str]


@dataclass(slots=True)
class TestedWell:
    """`faulty`: the disk tier's filesystem, None where none can be made, for which `why` is the reason. `struck` counts
    what was done to the well; `unrefused` are wells that came beside it and should not have."""

    __test__ = False  # for pytest

    folder: Path
    faulty: FaultyDisk | None
    why: str
    struck: Counter[str] = field(default_factory=Counter)
    unrefused: list[str] = field(default_factory=list)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def disk(self) -> Path:
        return (self.folder if self.faulty is None else self.faulty.path) / "disk"

    def connector(self, block: int = PAGE) -> dict[str, Any]:
        """Whatever is there is recalled: a disk that hung is not left alone because computing looks cheaper."""
        wishes = {"host": HOST, "disk": f"{self.disk}:{DISK}", "recall": "always", "log_level": "debug"}
        extra = {"home": str(self.home), "receipts": True, "block_tokens": block, **wishes}
        return {"kv_connector": NAME, "kv_role": "kv_both", "kv_connector_extra_config": extra}

    def env(self) -> dict[str, str]:
        """Of its engines: vLLM's sockets, which killed ones leave behind, go with the folder."""
        return {"VLLM_RPC_BASE_PATH": str(self.folder)}

    def stats(self) -> Stats:
        """Empty if the well does not answer."""
        try:
            return dict(control.stats(self.home))
        except StepwellError:
            return {}

    def pid(self) -> int:
        """0: there is none."""
        return control.pid(self.home) or 0

    def kill(self) -> None:
        self._signal("killed", signal.SIGKILL)

    def forget_host(self) -> None:
        """Drops host memory's blocks: what is asked for next comes from the disk. Quiet if it cannot, or not now."""
        with contextlib.suppress(StepwellError):
            control.clear(self.home, ["host"], seconds=1.0)

    def halt(self) -> None:
        self._signal("halted", signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal("went on", signal.SIGCONT)

    def stop(self) -> None:
        """As `stepwell stop` does; an engine that started it starts another one. Quiet if there is none."""
        with contextlib.suppress(BackendDown):
            control.stop(self.home)
            self.struck["stopped"] += 1

    def serves(self) -> bool:
        """It answers, and an engine has joined it."""
        return bool(self.stats().get("sessions"))

    def held(self, *, engines: int) -> str:
        """What is held, though nobody asks for anything and so many engines are there; empty if nothing is."""
        stats = self.stats()
        if not stats:
            return "the well does not answer"
        wrong = {name: stats[name] for name in BOOKS if stats[name]}
        if stats["sessions"] != engines or stats["quarantined_sessions"]:
            wrong["sessions"] = f"{stats['sessions']}, {stats['quarantined_sessions']} in quarantine"
        return ", ".join(f"{name} {value}" for name, value in wrong.items())

    def left(self) -> list[str]:
        """What there still is although no well should be: processes, and files that no well leaves."""
        found = [f"process {pid}" for pid in processes(self.home)]
        if self.home.is_dir():
            found += sorted(str(path) for path in self.home.iterdir() if path.name not in _KEPT)
        runtime = self.folder / "run" / "stepwell"
        if runtime.is_dir():
            found += sorted(str(path) for path in runtime.iterdir() if path.suffix != ".lock")
        if self.disk.is_dir():
            names = {path.name for path in self.disk.iterdir() if path.suffix != ".seg"} - {"lock", "README.txt"}
            found += sorted(names)
        return found

    def _signal(self, what: str, number: signal.Signals) -> None:
        if pid := self.pid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                self.struck[what] += 1


@contextlib.contextmanager
def tested_well(seed: int) -> Iterator[TestedWell]:
    """Nothing of it is left at the end, halted and hanging wells included. Starts none: its engines do."""
    why = why_not()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stepwell-trust-")))
        runtime, backing = folder / "run", folder / "backing"
        runtime.mkdir(mode=0o700)
        backing.mkdir(mode=0o700)
        stack.enter_context(_environment("XDG_RUNTIME_DIR", str(runtime)))
        faulty = None if why else stack.enter_context(FaultyDisk(backing, seed))
        well = TestedWell(folder, faulty, why)
        try:
            yield well
        finally:
            if faulty is not None:
                with contextlib.suppress(OSError):  # it has ended, and nothing hangs any more
                    faulty.heal()
            well.go_on()
            with contextlib.suppress(StepwellError):  # what it says to that is judged where it is a part of the trial
                well.stop()
            well.kill()


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
