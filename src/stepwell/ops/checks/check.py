"""One answer of `stepwell doctor`: ok, warn or fail, what was found, and how to fix it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from stepwell.errors import StepwellError

Status = Literal["ok", "warn", "fail"]
Facts = Mapping[str, int | float | str]


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check. `name` is stable, for programs; `of`: the directory that it concerns, if any. `text`: the
    finding; `fix`: what to do (empty if it is ok); `facts`: measurements by name, in bytes, seconds or GB/s."""

    name: str
    status: Status
    text: str
    fix: str = ""
    of: str = ""
    facts: Facts = field(default_factory=dict)


def failed(name: str, error: StepwellError, of: str = "") -> Check:
    """The check that ended with `error`."""
    return Check(name, "fail", f"{error.what}: {error.why} [{error.code}]", error.fix, of)


def guarded(name: str, checks: Callable[[], Iterable[Check]], of: str = "") -> Iterator[Check]:
    """The checks; one that ends with an error of ours or of the system is a failed one, not the end of the doctor."""
    try:
        yield from checks()
    except StepwellError as error:
        yield failed(name, error, of)
    except (OSError, ValueError) as error:
        yield Check(name, "fail", f"it could not be examined: {error}", "see the reason; the rest was examined", of)
