"""All points of a table, in several processes or on a cluster; points that are done already are skipped."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import blake3
import msgspec
import numpy as np

from stepwell.errors import ConfigError
from stepwell.policies.costs.hardware import preset
from stepwell.simulate.cluster import each as on_cluster
from stepwell.simulate.groups.model import ModelGroups
from stepwell.simulate.point import SweepRow, point
from stepwell.simulate.processes import each as in_processes
from stepwell.simulate.traces.trace import Trace

_VERSION = 2  # version of the keys: raise it when old replays would give other results
_BEGINS = b'{"key":"'  # every line of the file


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """A sweep: every policy at every capacity, in tokens, on every trace. `model`: what it keeps, where it is not only
    layers that need every token."""

    traces: Sequence[Trace]
    policies: Sequence[str]
    capacities: Sequence[SweepCapacity]
    cost: str
    model: ModelGroups | None = None

    def points(self) -> list[SweepPoint]:
        """The points, each once: of a small working set, several shares may be the same number of tokens."""
        points = (
            SweepPoint(index, policy, capacity.tokens(trace))
            for index, trace in enumerate(self.traces)
            for capacity in self.capacities
            for policy in self.policies
        )
        return list(dict.fromkeys(points))


@dataclass(frozen=True, slots=True)
class SweepCapacity:
    """A capacity in tokens, or as a share of the working set in whole blocks, at least one."""

    tokens_: int = 0
    share: float = 0.0

    def tokens(self, trace: Trace) -> int:
        return self.tokens_ or max(1, int(self.share * trace.distinct)) * trace.block_tokens


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """A point of the table. `trace`: its index among the traces."""

    trace: int
    policy: str
    capacity_tokens: int


class SweepRecord(msgspec.Struct, frozen=True):
    """A line of the file that an interrupted sweep goes on with. `key` names all that the row depends on."""

    key: str
    row: SweepRow


def sweep(
    wanted: SweepRequest, *, processes: int = 1, keep: Path | None = None, cluster: str = ""
) -> Iterator[tuple[SweepPoint, SweepRow]]:
    """Each point and its row, as they come. With `keep`, rows are added to that file as they come, and those that it
    has already are taken from there. `cluster`: of Ray, to be used instead of processes, as `cluster.each` has it.
    Raises ConfigError: SW-123 if the file cannot be read or written, SW-115 for an unknown cost, SW-127 for a cluster
    that cannot be used; CapacityError SW-205 for a process that is lost."""
    preset(wanted.cost)  # before anything else: it may not exist
    done = _kept(keep) if keep is not None else {}
    digests = [_digest(trace) for trace in wanted.traces]
    todo: list[SweepPoint] = []
    for at in wanted.points():
        row = done.get(_key(digests, at, wanted))
        if row is None:
            todo.append(at)
        else:
            yield at, row
    with closing(_run(wanted, todo, processes, cluster)) as ran:  # at once, also where an error keeps this frame
        for at, row in ran:
            if keep is not None:
                _add(keep, SweepRecord(_key(digests, at, wanted), row))
            yield at, row


def _run(
    wanted: SweepRequest, todo: Sequence[SweepPoint], processes: int, cluster: str
) -> Generator[tuple[SweepPoint, SweepRow], None, None]:
    if cluster and todo:
        yield from on_cluster(cluster, _row, wanted, todo)
    elif min(processes, len(todo)) > 1:
        answers = in_processes(processes, lambda index: msgspec.json.encode(_row(wanted, todo[index])), len(todo))
        with closing(answers):
            for index, answer in answers:
                yield todo[index], msgspec.json.decode(answer, type=SweepRow)
    else:
        for at in todo:
            yield at, _row(wanted, at)


def _row(wanted: SweepRequest, at: SweepPoint) -> SweepRow:
    trace, cost = wanted.traces[at.trace], preset(wanted.cost)
    return point(trace, at.policy, at.capacity_tokens, cost, wanted.cost, wanted.model)


def _digest(trace: Trace) -> str:
    hasher = blake3.blake3(repr((_VERSION, trace.name, trace.block_tokens)).encode())
    for part in (trace.times, trace.inputs, trace.starts, trace.ids):
        hasher.update(np.ascontiguousarray(part).tobytes())
    return hasher.hexdigest(16)


def _key(digests: Sequence[str], at: SweepPoint, wanted: SweepRequest) -> str:
    model = f" {wanted.model}" if wanted.model is not None else ""
    return f"{digests[at.trace]} {at.policy} {at.capacity_tokens} {wanted.cost}{model}"


def _kept(path: Path) -> dict[str, SweepRow]:
    """Makes the file if there is none, before anything is computed for it. A last line that was cut short by an
    interruption is taken out, so that the next one does not stand behind it."""
    try:
        with path.open("a+b") as file:
            file.seek(0)
            *lines, cut = file.read().split(b"\n")
            found = _rows(path, lines)
            if not _BEGINS.startswith(cut[: len(_BEGINS)]):
                raise _unusable(path, "its last line is no row of a sweep")
            if cut:
                file.truncate(file.tell() - len(cut))
    except OSError as error:
        raise _unusable(path, str(error)) from None
    return found


def _rows(path: Path, lines: Sequence[bytes]) -> dict[str, SweepRow]:
    found: dict[str, SweepRow] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = msgspec.json.decode(line, type=SweepRecord)
        except msgspec.MsgspecError as error:
            raise _unusable(path, f"line {number} is no row of a sweep: {error}") from None
        found[record.key] = record.row
    return found


def _add(path: Path, record: SweepRecord) -> None:
    try:
        with path.open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")
    except OSError as error:
        raise _unusable(path, str(error)) from None


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError("SW-123", what=f"{path} cannot keep the rows of a sweep", why=why, fix="name another file")
