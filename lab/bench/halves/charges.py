"""To whose memory cgroup the arena is charged when the well is a service of its own.

Well and worker are put into fresh cgroups (version 1 or 2, where this user may make them), the worker maps slabs and
writes every slot that it is leased, and what each cgroup's usage grew by is set against the bytes. Where no cgroup can
be made, what is left to see is how much of a slab the system held before the worker mapped it: memory is charged to who
touches it first. Run by itself as the worker: `python -m lab.bench.halves.charges HOME BLOCKS [CGROUP]`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.bench import wells
from lab.bench.halves.load import Members
from lab.bench.report import Row, Target
from stepwell.client import control
from stepwell.client.worker import WorkerClient
from stepwell.demo.results.stats import Estimate
from stepwell.io.memory import Bytes
from stepwell.protocol import messages as m

SHARD_BYTES = 30 * (96 << 10)
WORKER_SHARE = 0.05
"""Of the bytes it maps a worker needs some itself: page tables, and Python's own."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A fresh memory cgroup."""

    folder: Path
    usage_file: str

    def usage(self) -> int:
        return int((self.folder / self.usage_file).read_text())

    def take(self, pid: int) -> None:
        """Moves a process here: what it touches from now on is charged to this group."""
        (self.folder / "cgroup.procs").write_text(str(pid))


def rows(quick: bool) -> list[Row]:
    host = (1 << 30) if quick else (4 << 30)
    with wells.well(host) as home, _cgroups("well", "worker") as made:
        blocks = 16 if quick else 60
        if made is None:
            found = _worker(home, blocks, None)
            return [_unmeasured(), _touched(found)]
        of_well, of_worker = made
        of_well.take(wells.process(home))
        before = of_well.usage()
        found = _worker(home, blocks, of_worker)
        grown = of_well.usage() - before
        slabs = int(control.stats(home)["slab_bytes"])
        mapped = found["mapped_bytes"]
        beside = (
            f"{mapped / 2**20:.0f} MiB mapped, {found['written_bytes'] / 2**20:.0f} MiB of it written by the worker"
        )
        return [
            Row(
                "the worker's memory cgroup grew, of the slabs it mapped",
                "%",
                _exactly(100 * found["grown_bytes"] / mapped),
                Target("<=", 100 * WORKER_SHARE),
                beside,
            ),
            Row("  the well's, of the slabs it made", "%", _exactly(100 * grown / slabs)),
            _touched(found),
        ]


def _touched(found: dict[str, Any]) -> Row:
    return Row("  of a slab, touched before the worker mapped it", "%", _exactly(100 * found["touched_before"]))


def _unmeasured() -> Row:
    return Row(
        "the worker's memory cgroup grew, of the slabs it mapped",
        "%",
        None,
        Target("<=", 100 * WORKER_SHARE),
        "no memory cgroup can be made here",
    )


def _exactly(value: float) -> Estimate:
    """Counted once, not estimated."""
    return Estimate(value, value, value, 1)


# --- cgroups ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _cgroups(*names: str) -> Iterator[Sequence[Cgroup] | None]:
    """Fresh memory cgroups, empty and gone at the end; None where they cannot be made."""
    made: list[Cgroup] = []
    try:
        try:
            for name in names:
                made.append(_make(f"stepwell-bench-{secrets.token_hex(4)}-{name}"))
        except OSError:
            yield None
            return
        yield made
    finally:
        for group in made:
            _remove(group)


def _make(name: str) -> Cgroup:
    """Below the root, whose processes are not ours to count. Raises OSError where that is not allowed."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    if (v1 / "memory.usage_in_bytes").exists():
        (v1 / name).mkdir()
        return Cgroup(v1 / name, "memory.usage_in_bytes")
    if "memory" not in (v2 / "cgroup.subtree_control").read_text().split():
        raise OSError("the root does not hand the memory controller down")
    (v2 / name).mkdir()
    return Cgroup(v2 / name, "memory.current")


def _remove(group: Cgroup) -> None:
    """What is still in it goes back to its parent."""
    for pid in (group.folder / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):
            (group.folder.parent / "cgroup.procs").write_text(pid)
    for _ in range(50):
        with contextlib.suppress(OSError):
            group.folder.rmdir()
            return
        time.sleep(0.1)


# --- the worker -------------------------------------------------------------------------------------------------------


def _worker(home: Path, blocks: int, group: Cgroup | None) -> dict[str, Any]:
    command = [sys.executable, "-m", "lab.bench.halves.charges", str(home), str(blocks)]
    if group is not None:
        command += [str(group.folder), group.usage_file]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=wells.PATIENCE_S)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


class _Looking(WorkerClient):
    """Notes, of every slab that it is sent, how much the system holds already."""

    touched: list[tuple[int, int]]

    def received(self, message: m.FromWell, fds: Sequence[int]) -> None:
        if isinstance(message, m.SlabShared):
            self.touched.append((os.fstat(fds[0]).st_blocks * 512, message.nbytes))
        super().received(message, fds)


def _filled(slot: Bytes) -> int:
    slot[:] = 7
    return len(slot)


def main() -> None:
    home, blocks = Path(sys.argv[1]), int(sys.argv[2])
    group = Cgroup(Path(sys.argv[3]), sys.argv[4]) if len(sys.argv) > 3 else None
    if group is not None:
        group.take(os.getpid())
    touched: list[tuple[int, int]] = []
    _Looking.touched = touched
    before = group.usage() if group is not None else 0
    members = Members(home, SHARD_BYTES, worker=_Looking)
    written = 0
    for _ in range(blocks):
        spill = members.reserve(secrets.token_bytes(32))
        with members.worker.copying() as hold:
            filled = [_filled(slot) for _, _, slot in members.slots(hold, spill)]
        if not filled:
            break
        written += sum(filled)
        members.acknowledge(spill)
    held, mapped = (sum(column) for column in zip(*touched, strict=True))
    found = {
        "grown_bytes": group.usage() - before if group is not None else None,
        "mapped_bytes": mapped,
        "written_bytes": written,
        "touched_before": held / mapped,
    }
    print(json.dumps(found))
    members.close()


if __name__ == "__main__":
    main()
