"""The flags that make vLLM use stepwell."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from stepwell.cli.options import Disk, Json, joined
from stepwell.cli.output import emit
from stepwell.errors import ConfigError
from stepwell.io.paths import Rendezvous

MIN_CPU = 64 << 20
"""Bytes of vLLM's host memory below which a size was meant in another unit."""


def vllm_args(
    host: Annotated[str | None, typer.Option(help="Size of the host tier of a well that vLLM starts.")] = None,
    disk: Disk = None,
    home: Annotated[Path | None, typer.Option(help="Home of the well, if it is not the default one.")] = None,
    socket: Annotated[
        Path | None, typer.Option(help="Join the well that listens at this path; never start one.")
    ] = None,
    strict: Annotated[bool, typer.Option(help="Let vLLM refuse to start where stepwell cannot serve.")] = False,
    receipts: Annotated[bool, typer.Option(help="Let answers say what was recalled for their request.")] = False,
    second_door: Annotated[
        bool, typer.Option("--second-door", help="Put the well below vLLM's own offloading, which copies on any GPU.")
    ] = False,
    cpu: Annotated[
        str | None,
        typer.Option(help="With --second-door: size of vLLM's host memory, for each engine; --host is a window then."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the flags to add to `vllm serve MODEL`.

    They may be for this host or for another one.
    """
    from stepwell.config.places import parse_places

    extra: dict[str, Any] = {}
    if host is not None:
        _check(host)
        extra["host"] = host
    if (places := joined(disk)) is not None:
        extra["disk"] = ",".join(map(str, parse_places(places)))
    if home is not None:
        extra["home"] = str(home.expanduser().absolute())
    if socket is not None:
        extra["socket"] = str(Rendezvous.named(socket.expanduser().absolute()).socket)
    extra |= {name: True for name, on in (("strict", strict), ("receipts", receipts)) if on}
    transfer = _below_offloading(extra, cpu) if second_door else _connector(extra, cpu)
    arguments = ["--kv-transfer-config", json.dumps(transfer, separators=(",", ":")), "--shutdown-timeout", "10"]
    emit({"arguments": arguments}, as_json=as_json, text=shlex.join(arguments))


def _check(host: str) -> None:
    from stepwell.config import check_host
    from stepwell.io.host import memory_allowed
    from stepwell.units import parse_amount

    allowed = memory_allowed()
    try:
        check_host(parse_amount(host).of(allowed), allowed)
    except ConfigError as error:
        if error.code != "SW-106":  # they may be for a larger machine
            raise
        typer.echo(f"stepwell: not on this machine: {error}", err=True)


def _connector(extra: dict[str, Any], cpu: str | None) -> dict[str, Any]:
    from stepwell.engines.vllm.plugin import NAME

    if cpu is not None:
        raise _unsuited("--cpu", "StepwellConnector keeps what is hot in the well's host tier", "use --host")
    transfer: dict[str, Any] = {"kv_connector": NAME, "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    return {**transfer, "kv_connector_extra_config": extra} if extra else transfer


def _below_offloading(extra: dict[str, Any], cpu: str | None) -> dict[str, Any]:
    from stepwell.engines.vllm.plugin import TIER
    from stepwell.units import parse_size

    if cpu is None:
        why = "vLLM's offloading has no default for the host memory between its pages and the well"
        raise _unsuited("--second-door without --cpu", why, "give its size, for example --cpu 64GiB")
    if (cpu_bytes := parse_size(cpu)) < MIN_CPU:
        raise _unsuited(f"--cpu {cpu}", "it is less than 64 MiB", "name the unit, for example --cpu 64GiB")
    if "receipts" in extra:
        raise _unsuited("--receipts", "vLLM's offloading writes the answers", "leave it out")
    offloading = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": cpu_bytes,
        "secondary_tiers": [{"type": TIER, **extra}],
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": offloading,
    }


def _unsuited(what: str, why: str, fix: str) -> ConfigError:
    return ConfigError("SW-102", what=f"{what} cannot be used here", why=why, fix=fix)
