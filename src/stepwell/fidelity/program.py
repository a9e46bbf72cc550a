"""`stepwell fidelity`: from its arguments to rows. Nothing is downloaded."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepwell.demo.model import prepare
from stepwell.demo.progress import Progress
from stepwell.errors import ConfigError
from stepwell.fidelity import options
from stepwell.fidelity.text import Text
from stepwell.ops import machine

if TYPE_CHECKING:
    from stepwell.fidelity.matrix import Plan
    from stepwell.fidelity.results.rows import FidelityRow

POLICIES = "stepwell,full,oracle,recency,random"
TASKS = "kvtable,json_extract,multi_needle,variable_tracking,copy_span,multi_turn,nat,passkey"
LENGTHS, BUDGETS = "2K", "6.25%,12.5%,25%"
DOCUMENTS, SEEDS = 5, 3
QUICK = {
    "policies": "stepwell,full,oracle,recency",
    "tasks": "kvtable,nat(24)",
    "lengths": "1K",
    "budgets": "12.5%",
    "documents": 5,
    "seeds": 1,
}
"""Arguments for 400 digits: 5 documents of 16 rows of 5."""
_OPTIONS = {"own": "--tasks", "tasks": "--tasks-named", "limit_s": "--limit-seconds"}


@dataclass(frozen=True, slots=True)
class FidelityRequest:
    """Arguments of the command; None: the default, or the quick default. `own`: a file of a user's documents, which run
    alone unless `tasks` names others beside them."""

    model: Path | None = None
    own: Path | None = None
    policies: str | None = None
    tasks: str | None = None
    lengths: str | None = None
    budgets: str | None = None
    documents: int | None = None
    seeds: int | None = None
    quick: bool = False
    tier: str = "host"
    hot: str = "25%"
    disk: Path | None = None
    audit: bool = False
    limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    rows: list[FidelityRow]
    model: str
    facts: dict[str, Any]


def run(wanted: FidelityRequest, progress: Progress) -> Result:
    """Raises ConfigError: SW-112 for the model, SW-113 for what is not installed, SW-128 for all that was asked for."""
    for package in ("torch", "transformers"):
        if find_spec(package) is None:
            raise ConfigError(
                "SW-113",
                what=f"the package {package} is not installed",
                why="policies are measured with a real model",
                fix="in a clone of stepwell: pip install '.[transformers]'",
            )
    folder = prepare(wanted.model, progress)
    text = Text.of_model(folder)
    plan = _plan(wanted, text)
    facts: dict[str, Any] = {"command": command(wanted), **machine.facts()}
    facts["load_average_before"] = facts.pop("load_average")
    with progress.waiting(f"loading {folder.name}"):
        model = _loaded(folder)
    from stepwell.fidelity import matrix

    rows = matrix.run(model, text, plan, progress.say)
    return Result(rows, folder.name, facts | {"load_average_after": machine.load_average()})


def command(wanted: FidelityRequest) -> str:
    """The command line for the same rows: defaults are left out, and only names of files are shown."""
    given = ["stepwell fidelity"]
    for field in fields(FidelityRequest):
        value, option = getattr(wanted, field.name), _OPTIONS.get(field.name, f"--{field.name}")
        if value is True:
            given.append(option)
        elif value not in (None, False, field.default):
            given += [option, shlex.quote(value.name if isinstance(value, Path) else str(value))]
    return " ".join(given)


def _plan(wanted: FidelityRequest, text: Text) -> Plan:
    from stepwell.fidelity.matrix import Plan
    from stepwell.fidelity.tasks import own

    def chosen(name: str, usual: Any) -> Any:
        given = getattr(wanted, name)
        return given if given is not None else QUICK[name] if wanted.quick else usual

    if wanted.tier not in ("host", "disk"):
        raise ConfigError("SW-128", what=f"there is no tier {wanted.tier!r}", why="cold pages lie in host memory or on "
                          "disk", fix="give --tier host or --tier disk")  # fmt: skip
    named = wanted.tasks if wanted.own is not None and wanted.tasks is None else chosen("tasks", TASKS)
    return Plan(
        configs=options.configs(chosen("policies", POLICIES)),
        tasks=options.names(named) if named is not None else (),
        lengths=options.lengths(chosen("lengths", LENGTHS)),
        budgets=options.shares(chosen("budgets", BUDGETS), "--budgets"),
        documents=chosen("documents", DOCUMENTS),
        seeds=chosen("seeds", SEEDS),
        own=own.read(wanted.own, text) if wanted.own is not None else (),
        tier="disk" if wanted.tier == "disk" else "host",
        hot_share=options.shares(wanted.hot, "--hot")[0],
        disk=wanted.disk,
        audit=wanted.audit,
        limit_s=wanted.limit_s,
    )


def _loaded(folder: Path) -> Any:
    """The model in float32, on the CPU: the measurement is of the policy, not of rounding."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            "SW-112",
            what=f"the model in {folder} cannot be loaded",
            why=str(error),
            fix="name a folder with a decoder model that transformers can load",
        ) from error
    return model.eval()
