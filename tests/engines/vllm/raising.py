"""Makes the statements of some modules raise, one at a time, wherever a scenario comes by: by a tracer, not by hand."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

from lab.rig.suite.amount import some_or_many

in_parts = some_or_many("percent", 12, 100)
"""Of the statements, so many are tried."""


def drawn(percent: int) -> bool:
    return random.randrange(100) < percent


class Raised(Exception):
    """On purpose."""


class Statement(NamedTuple):
    """A line, and the functions of these modules that had called each other to get there."""

    file: str
    line: int
    calls: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line} in {' > '.join(self.calls)}"


class Tracer:
    """`watched` sees each statement that is reached in functions whose code is in `codes`. `line`: only those there."""

    def __init__(
        self, codes: Iterable[CodeType], watched: Callable[[Statement], None], line: tuple[str, int] | None = None
    ) -> None:
        self._codes = frozenset(codes)
        self._watched = watched
        self._line = line

    def __enter__(self) -> None:
        sys.settrace(self._called)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        here = self._line is None or self._line[0] == frame.f_code.co_filename
        return self._traced if here and frame.f_code in self._codes else None

    def _traced(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and (self._line is None or self._line[1] == frame.f_lineno):
            self._watched(Statement(frame.f_code.co_filename, frame.f_lineno, self._calls(frame)))
        return self._traced

    def _calls(self, frame: FrameType | None) -> tuple[str, ...]:
        names: list[str] = []
        while frame is not None:
            if frame.f_code in self._codes:
                names.append(frame.f_code.co_name)
            frame = frame.f_back
        return tuple(reversed(names))


def codes_of(module: ModuleType) -> list[CodeType]:
    """Of all functions that are written in this module, those in others included."""
    found: list[CodeType] = []
    todo = [_code(value) for thing in vars(module).values() for value in (thing, *_members(thing, module))]
    while todo:
        code = todo.pop()
        if code is not None and code.co_filename == module.__file__ and code not in found:
            found.append(code)
            todo += [const for const in code.co_consts if isinstance(const, CodeType)]
    return found


def _members(thing: Any, module: ModuleType) -> list[Any]:
    return list(vars(thing).values()) if inspect.isclass(thing) and thing.__module__ == module.__name__ else []


def _code(value: Any) -> CodeType | None:
    value = inspect.unwrap(value) if callable(value) else value
    value = getattr(value, "fget", None) or getattr(value, "__func__", None) or value
    return getattr(value, "__code__", None)


def statements(codes: Iterable[CodeType], scenario: Callable[[], None]) -> list[Statement]:
    """All that the scenario comes by, in order."""
    found: dict[Statement, None] = {}
    with Tracer(codes, lambda statement: found.setdefault(statement)):
        scenario()
    return list(found)


def raising(codes: Iterable[CodeType], at: Statement, scenario: Callable[[], None]) -> bool:
    """Runs the scenario, in which this statement raises when it is reached for the first time. Whether it was."""
    reached: list[Statement] = []

    def raise_there(statement: Statement) -> None:
        if statement == at:
            reached.append(statement)
            raise Raised(str(at))  # which ends the tracing

    with Tracer(codes, raise_there, at[:2]):
        scenario()
    return bool(reached)
