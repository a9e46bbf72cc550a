"""One YAML file to a flat list of settings, each with its line.

Only the syntax tree of PyYAML's safe loader is used; no YAML type is ever constructed. Every scalar is text, exactly
as an environment variable would give it, so `010`, `1:30` or `no` mean what is written and not what YAML 1.1 makes of
them; the settings' own types read the text. Aliases and tags are refused: settings do not need them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from stepwell.errors import ConfigError

_MAX_BYTES = 1 << 20
_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "map", "seq")}


@dataclass(frozen=True, slots=True)
class SettingEntry:
    """One value of one source: its path of keys, the value, and where it was written."""

    path: tuple[str, ...]
    value: object
    origin: str


def read(path: Path, *, missing_ok: bool = False) -> list[SettingEntry]:
    """All values in the YAML file at `path`, in order. Raises ConfigError SW-103 (cannot be read) or SW-105."""
    try:
        raw = _content(path)
    except (OSError, ValueError) as error:
        if missing_ok and isinstance(error, FileNotFoundError):
            return []
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            "SW-103",
            what=f"{path} cannot be read",
            why=reason,
            fix="correct the path or the file's permissions, or leave the file out",
        ) from error
    if len(raw) > _MAX_BYTES:
        raise _bad(str(path), "it is larger than 1 MiB", "keep only settings in this file")
    return parse(raw, str(path))


def _content(path: Path) -> bytes:
    """Reads the file without ever waiting for a pipe or a terminal. Raises OSError, and ValueError if it is no regular
    file."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("it is a directory, a pipe or a device, and no regular file")
        with open(fd, "rb", closefd=False) as file:
            return file.read(_MAX_BYTES + 1)
    finally:
        os.close(fd)


def parse(raw: bytes, name: str) -> list[SettingEntry]:
    """All values in `raw`, the bytes of a file that messages call `name`. Raises ConfigError SW-105."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _bad(f"{name}:{line}", "it is not UTF-8 text", "save the file as UTF-8") from error
    try:
        root = yaml.compose(text, Loader=_TreeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise _bad(where, error.problem or "it is not YAML", "correct the line") from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        # The scanner raises plain errors for impossible escapes, and nesting is bounded by the stack.
        raise _bad(name, "it is not YAML, or nested too deeply", "write one `key: value` per line") from error
    if root is None or _is_null(root):
        return []
    if not isinstance(root, yaml.MappingNode):
        raise _bad(_at(root, name), "it holds no settings by name", "write one `key: value` per line")
    return list(_walk(root, (), name))


class _TreeLoader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases are not supported", problem_mark=mark)
        return super().compose_node(parent, index)


_TreeLoader.yaml_implicit_resolvers = {}  # every plain scalar is text


def _walk(node: yaml.MappingNode, prefix: tuple[str, ...], name: str) -> Iterator[SettingEntry]:
    seen: set[str] = set()
    for key_node, value_node in node.value:
        where = _at(key_node, name)
        _refuse_tag(key_node, name)
        if not isinstance(key_node, yaml.ScalarNode) or _is_null(key_node):
            raise _bad(where, "a setting has no name", "write `key: value`")
        key = key_node.value
        if key in seen:
            raise _bad(where, f"{'.'.join((*prefix, key))} is set twice in this file", "remove one of the two")
        seen.add(key)
        if isinstance(value_node, yaml.MappingNode):
            _refuse_tag(value_node, name)
            if not value_node.value:
                yield SettingEntry((*prefix, key), None, where)
            yield from _walk(value_node, (*prefix, key), name)
        else:
            yield SettingEntry((*prefix, key), _value(value_node, name), where)


def _value(node: yaml.Node, name: str) -> object:
    _refuse_tag(node, name)
    if isinstance(node, yaml.MappingNode):
        return {str(_value(key, name)): _value(value, name) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, name) for item in node.value]
    return None if _is_null(node) else node.value


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in ("", "~", "null")


def _refuse_tag(node: yaml.Node, name: str) -> None:
    if node.tag not in _PLAIN_TAGS:
        raise _bad(_at(node, name), f"the tag {node.tag!r} is not supported", "write the plain value")


def _at(node: yaml.Node, name: str) -> str:
    return f"{name}:{node.start_mark.line + 1}"


def _bad(where: str, why: str, fix: str) -> ConfigError:
    return ConfigError("SW-105", what=f"{where}: this is not a file of settings", why=why, fix=fix)
