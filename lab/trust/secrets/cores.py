"""Core dumps that are forced, and what of a secret can be found in them."""

from __future__ import annotations

import base64
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

_GDB_SECONDS = 120
_PIECE = 64 << 10


def can_force() -> str:
    """Why no process but our own children can be dumped here; "" if they can."""
    if shutil.which("gdb") is None:
        return "no gdb here"
    if os.geteuid():
        return "not root, who alone may dump a process that forbids it"
    return ""


def forced(pid: int, path: Path) -> Path:
    """A core of a running process, taken by gdb at `path`: of what the process lets into its dumps. Raises OSError
    where it cannot be taken."""
    switches = ("set auto-load off", "set debuginfod enabled off", "set auto-solib-add off")
    early = [word for switch in switches for word in ("-iex", switch)]
    command = ["gdb", "--nx", "--batch", *early, "-p", str(pid), "-ex", f"generate-core-file {path}"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=_GDB_SECONDS, check=False)
    if not path.exists():
        raise OSError(f"gdb took no core: {said.stderr.strip()[-300:]}")
    return path


def memory(pid: int, path: Path) -> Path:
    """All that the process may write to, at `path`, without what is zeros: what a dump would hold if nothing were left
    out. Raises OSError."""
    with path.open("wb") as out, open(f"/proc/{pid}/mem", "rb", buffering=0) as source:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            if not rights.startswith("rw"):
                continue
            at, end = (int(side, 16) for side in span.split("-"))
            source.seek(at)
            while at < end and (piece := source.read(min(end - at, _PIECE))):
                at += len(piece)
                if any(piece):
                    out.write(piece)
    return path


def of_the_kernel(process: subprocess.Popen[str], folder: Path) -> Path | None:
    """The core that the kernel writes when the process, whose working directory is `folder`, aborts; None if it writes
    none there. Where cores go somewhere else, `goes_here` says so."""
    process.send_signal(signal.SIGABRT)
    process.wait()
    return next(folder.glob("core*"), None)


def goes_here() -> bool:
    """The kernel writes cores into the working directory of who dies."""
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    return pattern.startswith("core") and "/" not in pattern


def shapes(secret: bytes) -> Iterator[bytes]:
    """What a key of 32 bytes looks like wherever it lies: both halves, as they are (a schedule of AES-256 begins with
    the key itself), with the bytes of each word turned round, and as the pads of HMAC; in base64 and in digits."""
    turned = b"".join(secret[at : at + 4][::-1] for at in range(0, len(secret), 4))
    for form in (secret, turned, bytes(b ^ 0x36 for b in secret), bytes(b ^ 0x5C for b in secret)):
        yield from (form[:16], form[16:])
    yield base64.b64encode(secret)[:40]
    yield secret.hex().encode()


def found(path: Path, secrets: Mapping[str, Iterable[bytes]]) -> dict[str, int]:
    """How often any of the byte strings of each name occurs in the file; names that occur."""
    content = path.read_bytes()  # many times faster to search than a mapping
    counts = {name: sum(map(content.count, wanted)) for name, wanted in secrets.items()}
    return {name: n for name, n in counts.items() if n}
