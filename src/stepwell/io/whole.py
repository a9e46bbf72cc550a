"""Small files that are replaced as a whole: no reader ever sees half of one, and no power cut restores the old one."""

from __future__ import annotations

import os
from pathlib import Path


def replace(folder: Path, name: str, text: str) -> None:
    """Replaces the file `name` of `folder` by this text, ASCII, for its owner only. On disk when this returns; raises
    OSError. The text is written to `name`.new first, which a killed process leaves behind and the next call
    overwrites."""
    new_name = f"{name}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(folder / new_name, flags, 0o600), "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(folder / new_name, folder / name)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
