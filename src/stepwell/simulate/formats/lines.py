"""Files of lines, plain or compressed with zstd, recognised by their first bytes, not by their names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from stepwell.errors import ConfigError
from stepwell.simulate.traces.problems import Problems, unusable

MAX_LINE = 64 << 20
_ZSTD = b"\x28\xb5\x2f\xfd"

Lines = Iterator[tuple[int, bytes]]


def lines_of(path: Path, problems: Problems) -> Lines:
    """Number (from 1) and text of each line that is not blank, one in memory at a time.

    A file that is cut off or damaged ends early, which is a problem. So does one with a line over 64 MiB. Raises
    ConfigError: SW-122 if it cannot be read at all, SW-113 if what unpacks zstd is not installed.
    """
    number = 0
    damage: tuple[type[Exception], ...] = ()
    try:
        with path.open("rb") as raw:
            file: IO[bytes] = raw
            if raw.peek(len(_ZSTD)).startswith(_ZSTD):
                module = zstd()
                file, damage = module.open(raw), (EOFError, module.ZstdError)
            while line := file.readline(MAX_LINE):
                number += 1
                if len(line) == MAX_LINE:
                    problems.ends(number - 1, "the next line is longer than 64 MiB")
                    return
                text = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
                if text:
                    yield number, text
    except damage as error:
        problems.ends(number, f"its compressed data are cut off or damaged ({error})")
    except OSError as error:
        raise unusable(
            problems.source, f"it cannot be read: {error.strerror or error}", "name a file of lines"
        ) from error


def writer(path: Path) -> IO[bytes]:
    """Opens `path` for writing, compressed if its name ends in .zst. Raises OSError, and ConfigError as `lines_of`."""
    if path.suffix == ".zst":
        file: IO[bytes] = zstd().open(path, "wb")
        return file
    return path.open("wb")


def zstd() -> Any:
    """The standard library's module, or its backport. Raises ConfigError SW-113."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd as module
        else:
            from backports import zstd as module
    except ImportError as error:
        raise ConfigError(
            "SW-113",
            what="files compressed with zstd cannot be read or written",
            why=f"the module {error.name} is not installed",
            fix="install stepwell's extra `simulate`: in a clone, pip install '.[simulate]'; or unpack the file first",
        ) from error
    return module
