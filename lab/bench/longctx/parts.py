"""Measurements that take longer than one run may: parts that are kept, for a later run to go on from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from lab import FOLDER
from lab.bench.longctx.stage import Stage
from stepwell.ops import machine

Numbers = dict[str, float]


class _Kept(msgspec.Struct):
    of: str
    parts: dict[str, Numbers]


@dataclass(slots=True)
class Parts:
    """By name. `of`: what they are parts of, source revision included; other parts are begun anew."""

    path: Path | None
    of: str
    _found: dict[str, Numbers] = field(default_factory=dict)
    _longest: dict[str, float] = field(default_factory=dict)
    _began: float = 0.0

    @classmethod
    def open(cls, folder: Path | None, name: str, of: str, revision: str | None = None) -> Parts:
        """`folder` None: nothing is kept. Nothing is taken up from changed sources, or ones that no revision names."""
        known = revision or machine.revision(machine.SOURCE, FOLDER)
        whole = f"{known}: {of}"
        if folder is None or known is None or known.endswith("-changed"):
            return cls(None, whole)
        path = folder / f"{name}.parts.json"
        try:
            kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
        except (OSError, msgspec.MsgspecError):
            return cls(path, whole)
        return cls(path, whole, kept.parts if kept.of == whole else {})

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def __getitem__(self, name: str) -> Numbers:
        return self._found[name]

    def items(self) -> Iterator[tuple[str, Numbers]]:
        yield from self._found.items()

    def time_for(self, kind: str, stage: Stage) -> bool:
        """Whether another part of this kind, the first word of its name, fits into what is left of the time: as long
        as the longest so far; an unknown one is tried."""
        self._began = stage.left
        return self._began > self._longest.get(kind, 0.0)

    def add(self, name: str, numbers: Numbers, stage: Stage) -> None:
        """What was measured since `time_for` was asked."""
        self._found[name] = numbers
        kind = name.split()[0]
        self._longest[kind] = max(self._longest.get(kind, 0.0), self._began - stage.left)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(msgspec.json.format(msgspec.json.encode(_Kept(self.of, self._found)), indent=1))
