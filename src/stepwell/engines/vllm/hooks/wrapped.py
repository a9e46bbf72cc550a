"""Finds out whether a connector is a part of another one, as vLLM's MultiConnector makes them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cached_property, partialmethod
from types import CodeType, FrameType, FunctionType
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from stepwell.errors import Unsupported


def maker_of(connector: KVConnectorBase_V1) -> KVConnectorBase_V1 | None:
    """The other connector in one of whose methods `connector` is being constructed; None of an engine's only one.

    Nothing else tells: a part gets a copy of the engine's configuration that names it alone. Called by a constructor.
    A function that is merely given a connector is no method of it. Does not see a maker that has its parts constructed
    by another thread.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(first, KVConnectorBase_V1) and first is not connector and _is_method(code, type(first)):
            return first
        frame = frame.f_back
    return None


def _is_method(code: CodeType, kind: type) -> bool:
    """Whether `code` is that of a function in `kind` or a class above it, also below decorators."""
    left: list[Any] = [value for above in kind.__mro__ for value in vars(above).values()]
    met: set[int] = set()
    while left:
        value = left.pop()
        if id(value) in met:
            continue
        met.add(id(value))
        if isinstance(value, FunctionType) and value.__code__ is code:
            return True
        left += _inside(value)
    return False


def _inside(value: Any) -> Iterator[Any]:
    """Functions that a decorator has wrapped in `value`, found in its closure if it does without functools.wraps."""
    match value:
        case property():
            yield from (value.fget, value.fset, value.fdel)
        case cached_property() | partialmethod():
            yield value.func
        case _ if isinstance(held := getattr(value, "__dict__", None), dict):
            yield held.get("__wrapped__")  # also of classmethods and of what functools.lru_cache returns
    if isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # an empty cell
                continue


def part_of(maker: KVConnectorBase_V1) -> Unsupported:
    return Unsupported(
        "SW-718",
        what=f"stepwell as a part of {type(maker).__name__} is not supported yet",
        why="a part sees neither what the engine does with failed loads nor whose they are, and could keep what was "
        "computed on top of one",
        fix="make StepwellConnector, or OffloadingConnector with stepwell below it, the engine's only connector",
    )
