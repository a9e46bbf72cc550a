"""The systems that are measured beside each other in one engine: nothing, vLLM's own tiers, stepwell's.

Each at its best settings, and with as much memory as the others of its kind. vLLM's tiers run on CPUs through
`benchmarks/peers`, which replaces the copy of its GPUs; see there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepwell.demo.well import MIB
from stepwell.engines.vllm.plugin import NAME
from stepwell.engines.vllm.plugin import TIER as TIER_TYPE
from stepwell.errors import ConfigError

LIMIT, VLLM_CPU, VLLM_FS, HOST, DISK = "limit", "vllm-cpu", "vllm-fs", "stepwell-host", "stepwell-disk"
TIER = "stepwell-tier"
SYSTEMS = (LIMIT, VLLM_CPU, VLLM_FS, HOST, DISK, TIER)
ON_DISK = (VLLM_FS, DISK, TIER)
SHIM = Path(__file__).resolve().parents[3] / "benchmarks" / "peers"
DISK_CAPACITY = 4 << 30

WINDOW = 256 * MIB
"""Arena of a well below vLLM's offloading, as it is by default: chunks only pass through. vLLM's CPU tier
in front of it is as large as in front of vLLM's own filesystem tier."""

_PEERS = (VLLM_CPU, VLLM_FS)
_SHIM_MODULE = "peers_cpu_shim"


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of host memory: of the systems that keep everything there, and of those with a disk behind it. `block`:
    tokens of stepwell's blocks; vLLM's tiers keep whole pages, and so does what is put beside them. 0: its default."""

    large: int
    small: int
    block: int = 0


@dataclass(frozen=True, slots=True)
class System:
    """`connector` is vLLM's KVTransferConfig, None for plain vLLM; `home` is that of stepwell's well, None for others;
    `disk` the folder of its files, None for what keeps none; `extra` are further arguments of its engine. A fresh one
    starts empty."""

    name: str
    connector: Mapping[str, Any] | None = None
    home: Path | None = None
    disk: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


def system(name: str, folder: Path, memory: Memory) -> System:
    """The system of this name, with all that it writes below `folder`."""
    disk = folder / f"{name}-files" if name in ON_DISK else None
    if disk is not None:
        disk.mkdir(mode=0o700)
    if name == TIER:
        home = folder / f"{name}-home"
        return System(name, tier_connector(home, memory, disk), home, disk, {"PYTHONPATH": python_path()})
    if name in _PEERS:
        return System(name, _offloading(memory, disk), None, disk, {"PYTHONPATH": python_path()})
    if name in (HOST, DISK):
        home = folder / f"{name}-home"
        return System(name, _stepwell(home, memory, disk), home, disk)
    return System(LIMIT)


def check(names: Sequence[str]) -> tuple[str, ...]:
    """The systems of these names, the limit always among them, in our order.

    Raises ConfigError: SW-102 for a name that is none, SW-113 where what vLLM's tiers need here is missing.
    """
    if unknown := [name for name in names if name not in SYSTEMS]:
        raise ConfigError(
            "SW-102",
            what=f"{unknown[0]} is not one of the systems that can be compared",
            why="their names are fixed",
            fix=f"choose from {', '.join(SYSTEMS)}",
        )
    chosen = tuple(name for name in SYSTEMS if name == LIMIT or name in names)
    if set(chosen) & {*_PEERS, TIER}:
        _check_shim()
    return chosen


def _check_shim() -> None:
    why = "vLLM's own offloading runs on CPUs only with another copy than its GPUs'"
    if not (SHIM / f"{_SHIM_MODULE}.py").is_file():
        raise ConfigError(
            "SW-113",
            what="benchmarks/peers is not there",
            why=why,
            fix="run this benchmark in a clone of the repository, or leave vLLM's tiers out: --systems limit,"
            "stepwell-host,stepwell-disk",
        )
    if shutil.which("cc") is None:
        raise ConfigError(
            "SW-113",
            what="there is no C compiler: the command cc is not installed",
            why=f"{why}, which is compiled when it is loaded",
            fix="install one (`apt install gcc libc6-dev`, `dnf install gcc`), or leave vLLM's tiers out: --systems "
            "limit,stepwell-host,stepwell-disk",
        )


def _offloading(memory: Memory, disk: Path | None) -> dict[str, Any]:
    settings: dict[str, Any] = {"spec_module_path": _SHIM_MODULE, "offload_prompt_only": False}
    if disk is None:
        settings |= {"spec_name": "CpuOffloadingSpec", "cpu_bytes_to_use": memory.large}
    else:
        settings |= {
            "spec_name": "CpuTieringSpec",
            "cpu_bytes_to_use": memory.small,
            "secondary_tiers": [{"type": "fs", "root_dir": str(disk)}],
        }
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": settings}


def tier_connector(home: Path, memory: Memory, disk: Path | None) -> dict[str, Any]:
    """vLLM's offloading with a well of this home below it."""
    offloading = _offloading(memory, disk)
    tier = {"type": TIER_TYPE, "home": str(home), "host": f"{WINDOW // MIB}MiB"}
    offloading["kv_connector_extra_config"]["secondary_tiers"] = [{**tier, "disk": f"{disk}:{DISK_CAPACITY >> 30}GiB"}]
    return offloading


def _stepwell(home: Path, memory: Memory, disk: Path | None) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "home": str(home),
        "host": f"{(memory.large if disk is None else memory.small) // MIB}MiB",
        "receipts": True,
        "canary": 0,
    }
    if disk is not None:
        settings["disk"] = f"{disk}:{DISK_CAPACITY >> 30}GiB"
    if memory.block:
        settings["block_tokens"] = memory.block
    return {"kv_connector": NAME, "kv_role": "kv_both", "kv_connector_extra_config": settings}


def python_path() -> str:
    return os.pathsep.join(filter(None, [str(SHIM), os.environ.get("PYTHONPATH")]))
