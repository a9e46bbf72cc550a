"""Settings from one YAML file, the environment and explicit overrides, in this order; the last one wins.

A key or value that is not understood is an error that names its place: a misspelt key must not silently mean its
default. Each value has its origin. Called by the well at start and by the command line; never by the engine side.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from stepwell import renamed
from stepwell.config import document
from stepwell.config.document import SettingEntry
from stepwell.config.settings import Settings, allowed
from stepwell.errors import ConfigError

FILE_NAME = "stepwell.yaml"
DEFAULT = "default"
OPTION = "--{}"
NAME = "NAME"
"""Stands in a dotted name for what a person calls a member of a group: `tenants.NAME.uids`."""
_PREFIX = "STEPWELL_"
# Two say where to look, before any file is read; the third asks the command line for a traceback.
_NOT_SETTINGS = frozenset({"STEPWELL_HOME", "STEPWELL_CONFIG", "STEPWELL_DEBUG"})

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[M]):
    """Settings with the origin of each by dotted name: `default`, `<file>:<line>`, `env <NAME>` or `--<option>`.
    `warnings`: a line for each value that is understood in this version for the last time."""

    settings: M
    origins: Mapping[str, str]
    warnings: tuple[str, ...] = ()


def load(
    home: Path,
    env: Mapping[str, str],
    *,
    path: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    origin: str = OPTION,
) -> Loaded[Settings]:
    """The settings of the well of `home`.

    The file is `path`, else $STEPWELL_CONFIG, else `home/stepwell.yaml` if there is one. Then STEPWELL_<KEY> variables
    of `env` (a dot in a key is written as two underscores), then `overrides` by dotted key, where None means not given;
    `origin` is where those were written, with {} for the key. Raises ConfigError: SW-101 (unknown key), SW-102 (bad
    value), SW-103 (file unreadable), SW-104 (unknown variable), SW-105 (not a file of settings).
    """
    named = path or (Path(env["STEPWELL_CONFIG"]) if env.get("STEPWELL_CONFIG") else None)
    entries = document.read(named) if named else document.read(home / FILE_NAME, missing_ok=True)
    return merge(Settings, [*entries, *from_env(env), *from_overrides(overrides or {}, origin)])


def from_env(env: Mapping[str, str]) -> Iterator[SettingEntry]:
    """An entry for each variable that must be a setting."""
    for name in sorted(env):
        if name.startswith(_PREFIX) and name not in _NOT_SETTINGS:
            yield SettingEntry(tuple(name.removeprefix(_PREFIX).lower().split("__")), env[name], f"env {name}")


def from_overrides(overrides: Mapping[str, object], origin: str = OPTION) -> Iterator[SettingEntry]:
    """An entry for each override that is not None, with this origin; see `load`."""
    for key, value in overrides.items():
        if value is not None:
            yield SettingEntry(tuple(key.split(".")), value, origin.format(key))


def merge(model: type[M], entries: Iterable[SettingEntry]) -> Loaded[M]:
    """A validated `model` of the entries, later ones replacing earlier ones. Raises ConfigError as `load` does."""
    names = list(_leaves(model))
    chosen: dict[str, SettingEntry] = {}
    tree: dict[str, Any] = {}
    given = list(entries)
    for entry in given:
        known = _known(entry.path, names)
        if known in names:
            chosen[".".join(entry.path)] = entry
        elif entry.value is not None or not _is_group(known, names):  # an empty group in a file sets nothing
            raise _unknown(model, entry, names)
        elif known.endswith(f".{NAME}"):
            _within(tree, entry.path)  # a named member exists even if it is empty
    warnings = []
    for entry in chosen.values():
        value = entry.value
        if isinstance(value, str) and (meant := renamed.value(entry.path[-1], value)) != value:
            warnings.append(f"{entry.origin}: {renamed.old_value(entry.path[-1], value)}")
            value = meant
        _within(tree, entry.path[:-1])[entry.path[-1]] = value
    try:
        settings = model.model_validate(tree)
    except ValidationError as error:
        raise _lacks(error, given) or _bad_value(model, error, chosen) from error
    origins = dict.fromkeys((name.partition(f".{NAME}.")[0] for name in names), DEFAULT)
    for dotted, entry in chosen.items():
        origins[_known(entry.path, names).partition(f".{NAME}.")[0] or dotted] = entry.origin
    return Loaded(settings, MappingProxyType(origins), tuple(warnings))


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        kind: Any = field.annotation
        if get_origin(kind) is dict:
            yield from _leaves(get_args(kind)[1], f"{prefix}{name}.{NAME}.")
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _leaves(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _known(path: tuple[str, ...], names: Iterable[str]) -> str:
    """The path as `names` have it: with NAME for what a person named."""
    done: list[str] = []
    for step in path:
        named = ".".join([*done, NAME, ""])
        done.append(NAME if any(name.startswith(named) for name in names) else step)
    return ".".join(done)


def _within(tree: dict[str, Any], path: Iterable[str]) -> dict[str, Any]:
    for step in path:
        tree = tree.setdefault(step, {})
    return tree


def _is_group(dotted: str, names: list[str]) -> bool:
    return any(name.startswith(f"{dotted}.") for name in names)


def _unknown(model: type[BaseModel], entry: SettingEntry, names: list[str]) -> ConfigError:
    dotted, known = ".".join(entry.path), _known(entry.path, names)
    if _is_group(known, names):
        members = [name for name in names if name.startswith(f"{known}.")]
        return ConfigError(
            "SW-102",
            what=f"{entry.origin}: {dotted} is a group of settings",
            why="it has no value of its own",
            fix=f"set one of {', '.join(members)}",
        )
    code, place, shown, all_names = "SW-101", f"{entry.origin}: ", dotted, names
    if entry.origin.startswith("env "):
        all_names = [_PREFIX + name.replace(".", "__").upper() for name in names]
        code, place, shown = "SW-104", "", entry.origin.removeprefix("env ")
    if whole := next((name for name in names if known.startswith(f"{name}.")), None):
        return ConfigError(
            code,
            what=f"{place}{shown} is not a setting",
            why=f"{whole} is one value, with no names in it",
            fix=f"write {whole} itself{_takes(model, whole)}",
        )
    close = difflib.get_close_matches(shown, all_names, n=1)
    guess = f"; did you mean {close[0]}?" if close else ""
    return ConfigError(
        code,
        what=f"{place}{shown} is not a setting{guess}",
        why="an unknown name would silently leave a default in force",
        fix=f"correct or remove it; the settings are {', '.join(all_names)}",
    )


def _bad_value(model: type[BaseModel], error: ValidationError, chosen: Mapping[str, SettingEntry]) -> ConfigError:
    first = error.errors()[0]
    dotted = ".".join(str(step) for step in first["loc"])
    origins = [entry.origin for name, entry in chosen.items() if f"{dotted}.".startswith(f"{name}.")]
    origins += [entry.origin for name, entry in chosen.items() if name.startswith(f"{dotted}.")]
    cause = first.get("ctx", {}).get("error")
    takes = _takes(model, str(first["loc"][0]))
    why, fix = first["msg"].partition(", unable")[0], f"correct the value{takes}, or remove it to use the default"
    if isinstance(cause, ConfigError):
        why, fix = cause.what, cause.fix
    return ConfigError("SW-102", what=f"{[*origins, DEFAULT][0]}: {dotted} cannot be used", why=why, fix=fix)


def _lacks(error: ValidationError, given: Iterable[SettingEntry]) -> ConfigError | None:
    """The error for a required setting that is missing, located where the first of its group is written; None: no such
    error."""
    errors = error.errors()
    if errors[0]["type"] != "missing":
        return None
    group = errors[0]["loc"][:-1]
    lacking = [str(one["loc"][-1]) for one in errors if one["type"] == "missing" and one["loc"][:-1] == group]
    dotted = [".".join(map(str, (*group, name))) for name in lacking]
    origins = [entry.origin for entry in given if entry.path[: len(group)] == group]
    return ConfigError(
        "SW-102",
        what=f"{[*origins, DEFAULT][0]}: {'.'.join(map(str, group))} lacks {', '.join(lacking)}",
        why="there is no default",
        fix=f"set {', '.join(dotted)}",
    )


def _takes(model: type[BaseModel], name: str) -> str:
    """The allowed values of a setting, to follow its name in a sentence; "" if its type does not define them."""
    what = allowed(model.model_json_schema()["properties"].get(name, {}))
    return f" ({what})" if what else ""
