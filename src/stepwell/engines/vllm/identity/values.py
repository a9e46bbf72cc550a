"""Values of vLLM's settings as text that every process writes in the same way, and settings that are refused."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import os
from collections.abc import Mapping
from typing import Any

from stepwell.errors import Unsupported


def canonical(value: Any) -> str:
    """`value` as JSON with sorted keys, the same in every process; Unsupported (SW-712) where that cannot be done."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))


def _plain(value: Any, depth: int = 0) -> Any:
    if depth > 32:
        raise no_option("a setting", "it is nested more than 32 deep or contains itself", "simplify the model's config")
    if value is None or type(value) in (bool, int, float, str):
        return value
    deeper = functools.partial(_plain, depth=depth + 1)
    match value:
        case enum.Enum():
            return f"<{type(value).__qualname__}.{value.name}>"
        case Mapping():
            return {key if type(key) is str else f"<{key!r}>": deeper(item) for key, item in value.items()}
        case list() | tuple():
            return [deeper(item) for item in value]
        case set() | frozenset():
            return sorted((deeper(item) for item in value), key=lambda item: json.dumps(item, sort_keys=True))
        case str() | int() | float() | os.PathLike():
            return f"<{_name(type(value))}>{value!s}"
        case bytes():
            return f"<bytes>{value.hex()}"
        case type():
            return f"<{_name(value)}>"
    if _name(type(value)) in ("torch.dtype", "torch.device", "fractions.Fraction"):
        return f"<{value}>"
    if dataclasses.is_dataclass(value):
        members = {field.name: deeper(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"<class>": _name(type(value)), **members}
    if callable(getattr(value, "to_dict", None)):
        return {"<class>": _name(type(value)), **deeper(value.to_dict())}
    if callable(getattr(value, "tolist", None)) and hasattr(value, "dtype"):
        return {"<class>": _name(type(value)), "dtype": str(value.dtype), "items": deeper(value.tolist())}
    # A repr may hold an address, and attributes may not be all that there is: better no namespace than a shared one.
    why = "its value has no text form that another process would repeat"
    raise no_option(f"a setting of type {_name(type(value))}", why, "set it by plain values")


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def refusal(code: str, what: str, why: str, fix: str) -> Unsupported:
    return Unsupported(code, what=f"{what} is not supported", why=why, fix=fix)


def no_option(what: str, why: str, fix: str) -> Unsupported:
    return refusal("SW-712", what, why, fix)
