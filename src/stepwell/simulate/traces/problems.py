"""Problems of a trace that did not stop its reading: counted, and reported with line numbers.

Readers report here and go on; `strict` turns the first malformed line into an error. Commands show `summary()`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stepwell.errors import ConfigError

SHOWN = 5  # malformed lines that are shown one by one; the rest is a count


@dataclass(frozen=True, slots=True)
class Malformed:
    """A line that was left out."""

    line: int  # from 1
    why: str


@dataclass(slots=True)
class Problems:
    """Problems of one trace. Only its reader changes them."""

    source: str
    strict: bool = False
    malformed: int = 0  # lines left out
    first: list[Malformed] = field(default_factory=list)  # the first malformed lines, at most SHOWN
    unsorted: int = 0  # requests that stood behind a later one, and were sorted
    renamed: int = 0  # blocks more than ids, where an id stood behind different prefixes
    cut: str = ""  # why the file was not read to its end
    notes: list[str] = field(default_factory=list)  # assumptions that were made

    def line(self, number: int, why: str) -> None:
        """Counts line `number` as left out. Raises ConfigError SW-122 if strict."""
        if self.strict:
            raise unusable(f"{self.source}, line {number}", why, "correct the line, or leave out --strict")
        self.malformed += 1
        if len(self.first) < SHOWN:
            self.first.append(Malformed(number, why))

    def ends(self, number: int, why: str) -> None:
        """Notes that nothing is read behind line `number`. Raises ConfigError SW-122 if strict."""
        if self.strict:
            raise unusable(f"{self.source}, behind line {number}", why, "get the whole file")
        self.cut = f"behind line {number}: {why}"

    def summary(self) -> list[str]:
        """One sentence for each kind of problem, for people; empty if there is none."""
        lines = [f"line {bad.line}: {bad.why}" for bad in self.first]
        if self.malformed:
            lines.append(f"{_count(self.malformed, 'malformed line')} left out")
        if self.cut:
            lines.append(f"not read to its end, {self.cut}")
        if self.unsorted:
            lines.append(f"{_count(self.unsorted, 'request')} out of order, sorted by time")
        if self.renamed:
            lines.append(
                "ids do not name a block together with all before it, so they were renamed: "
                f"{_count(self.renamed, 'block')} more than ids"
            )
        return lines + self.notes


def unusable(what: str, why: str, fix: str) -> ConfigError:
    """A trace that cannot be used, SW-122."""
    return ConfigError("SW-122", what=f"{what} cannot be used", why=why, fix=fix)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
