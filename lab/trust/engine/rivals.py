"""What the system and other wells take from a running well: descriptors, memory, its directory."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import subprocess
import sys

from lab.rig.well import until
from lab.trust.engine.well import DISK, HOST, TestedWell
from lab.trust.kills import memory
from lab.trust.kills.nth.calls import limit_files, open_files
from stepwell.client.socket import connect
from stepwell.client.start import rendezvous
from stepwell.errors import StepwellError

_SPARE_FILES, _CLIENTS = 3, 12
_MOST_BYTES = 48 << 20
_SECONDS = 2.0
_REFUSED_WITHIN_S = 60.0


class Descriptors:
    """The running well may open but a few more, and clients come that use these up. Only root may count a well's
    descriptors, which it hides."""

    def __init__(self, well: TestedWell) -> None:
        self._well = well
        self._pid = self._most = 0
        self._before = (0, 0)

    def begin(self, dice: random.Random) -> int:
        self._pid = self._well.pid()
        with contextlib.suppress(OSError):  # it has just ended
            self._before = resource.prlimit(self._pid, resource.RLIMIT_NOFILE) if self._pid else (0, 0)
            self._most = open_files(self._pid) + dice.randrange(_SPARE_FILES + 1)
            limit_files(self._pid, self._most)
        return 0

    def strike(self, dice: random.Random) -> int:
        """1 if none was left."""
        if not self._pid:
            return 0
        with contextlib.ExitStack() as clients:
            for _ in range(_CLIENTS):
                with contextlib.suppress(StepwellError, OSError):
                    clients.enter_context(connect(rendezvous(self._well.home).socket))
            return until(self._used_up, _SECONDS)

    def end(self, dice: random.Random) -> int:
        if self._pid:
            with contextlib.suppress(OSError):
                resource.prlimit(self._pid, resource.RLIMIT_NOFILE, self._before)
        self._pid = 0
        return 0

    def _used_up(self) -> bool:
        with contextlib.suppress(OSError):
            return open_files(self._pid) >= self._most
        return False


class Memory:
    """The next well gets some memory and no more, from the first moments of its start on: the kernel kills it when it
    needs more, at whatever it does then."""

    def __init__(self, well: TestedWell) -> None:
        self._well = well

    def strike(self, dice: random.Random) -> int:
        """1 if a well was killed for its memory."""
        self._well.stop()
        if not until(lambda: bool(self._well.pid()), _SECONDS):
            return 0  # whoever starts it gives it time
        with memory.group() as group, contextlib.suppress(OSError):  # it has just ended
            pid = self._well.pid()
            group.add(pid)
            group.allow(group.used_bytes() + dice.randrange(_MOST_BYTES))
            until(lambda: self._well.pid() != pid, _SECONDS)
            group.empty()
            return group.kills()
        return 0


class Rivals:
    """Second wells, on the directory of the disk tier or in the same home. They must be refused, and the first one must
    not be disturbed."""

    def __init__(self, well: TestedWell) -> None:
        self._well = well

    def strike(self, dice: random.Random) -> int:
        """1 if it was refused as it must be."""
        well = self._well
        home, code = dice.choice(((well.folder / "other", "SW-506"), (well.home, "SW-501")))
        pid = well.pid()
        if not pid:
            return 0
        settings = {"STEPWELL_HOST": HOST, "STEPWELL_DISK": f"{well.disk}:{DISK}"}
        command = [sys.executable, "-m", "stepwell", "serve", "--home", str(home), "--json"]
        try:
            ended = subprocess.run(
                command,
                env=os.environ | settings,
                capture_output=True,
                text=True,
                timeout=_REFUSED_WITHIN_S,
                check=False,
            )
            said, refused = ended.stdout + ended.stderr, ended.returncode > 0
        except subprocess.TimeoutExpired as error:  # it has been killed
            said, refused = f"it went on: {error.stdout!r} {error.stderr!r}", False
        if refused and code in said:
            return 1
        if well.pid() == pid:  # else it may have come between two wells
            well.unrefused.append(f"a second well was not refused with {code}: {said[-500:]}")
        return 0
