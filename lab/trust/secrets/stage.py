"""A well and an engine's client in processes of their own, in a folder of their own: both can be looked into."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO

from lab.rig.well import eventually
from stepwell.client import control

_SERVE = "from stepwell.cli.main import main; main()"
_END_S = 20.0
_UNLIMITED = ("sh", "-c", 'ulimit -c unlimited; exec "$@"', "sh")


class Stage:
    """`before`: a statement that the well runs first, to take one of its guards out. `settings`: of the well, by name.
    `keyring`: what lies in home already. Everything is gone at the end, `folder` too. Raises OSError where the well
    does not start."""

    def __init__(
        self, *, before: str = "pass", settings: Mapping[str, str] = MappingProxyType({}), keyring: bytes = b""
    ) -> None:
        self._held = contextlib.ExitStack()
        self.folder = Path(self._held.enter_context(tempfile.TemporaryDirectory(prefix="sw", dir="/tmp")))
        self.home, self.disk, self.run = self.folder / "home", self.folder / "disk", self.folder / "run"
        self.run.mkdir(mode=0o700)
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("STEPWELL_")}
        self.env |= {"XDG_RUNTIME_DIR": str(self.run), "TMPDIR": str(self.folder)}
        self.env |= {f"STEPWELL_{name.upper()}": value for name, value in settings.items()}
        self.home.mkdir(mode=0o700)
        if keyring:
            place = os.open(self.home / "keyring", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(place, "wb") as file:
                file.write(keyring)
        try:
            serve = ("serve", "--home", str(self.home), "--host", "64MiB", "--disk", f"{self.disk}:256MiB")
            self.well = self.start("well", "-c", f"{before}; {_SERVE}", *serve)
            words = self.say(self.well).split()
            if not words:
                raise OSError(f"the well does not start: {self.said('well')[-300:]}")
            self.socket = Path(words[-1])
        except BaseException:
            self.close()
            raise

    def start(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        """Python with these arguments, in a working directory of its own, where the kernel may write a core of it."""
        place = self.folder / name
        place.mkdir(exist_ok=True)
        errors = self._held.enter_context((place / "stderr").open("w"))
        process = subprocess.Popen(
            [*_UNLIMITED, sys.executable, *arguments],
            env=self.env, cwd=place, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip
        self._held.callback(end, process)
        return process

    def courier(self) -> subprocess.Popen[str]:
        process = self.start("courier", "-m", "lab.trust.secrets.courier", str(self.home), str(self.heard))
        if self.say(process) != "ready":
            raise OSError(f"the courier does not start: {self.said('courier')[-300:]}")
        return process

    def command(self, *words: str) -> str:
        """All that a `stepwell` command says, whatever came of it."""
        command = [sys.executable, "-m", "stepwell", *words, "--home", str(self.home)]
        said = subprocess.run(command, env=self.env, cwd=self.folder, text=True, capture_output=True, check=False)
        return said.stdout + said.stderr

    @property
    def heard(self) -> Path:
        """All that couriers got from the well."""
        return self.folder / "heard"

    def said(self, name: str) -> str:
        """What the process has written to standard error."""
        return (self.folder / name / "stderr").read_text("utf-8", "replace")

    @staticmethod
    def say(process: subprocess.Popen[str], line: str = "") -> str:
        """Its next line of output, after it was told `line`; "" at its end."""
        assert process.stdin is not None and process.stdout is not None
        if line:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        return process.stdout.readline().strip()

    def written(self) -> None:
        """Until everything that was spilled lies on disk. Raises TimeoutError."""

        def nothing_waits() -> bool:
            s = control.stats(self.home, 10, self.socket)
            return not s["disk_write_queue_bytes"] and not s["filling"]

        eventually(nothing_waits, "what waits is written")

    def close(self) -> None:
        self._held.close()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def end(process: subprocess.Popen[str]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            _close(stream)
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _close(stream: IO[str]) -> None:
    with contextlib.suppress(OSError):
        stream.close()
