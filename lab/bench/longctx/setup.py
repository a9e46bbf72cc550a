"""The model that is measured, and the texts that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from lab.bench.report import Row, Target
from stepwell.demo.model import prepare
from stepwell.demo.progress import Progress, progress
from stepwell.demo.results.stats import Estimate
from stepwell.fidelity import tasks
from stepwell.fidelity.document import Document
from stepwell.fidelity.text import Text

SEED = 8


@cache
def shown() -> Progress:
    return progress()


@dataclass(frozen=True, slots=True)
class Subject:
    """`name`: of the model, as rows and remarks say it."""

    model: Any
    text: Text
    name: str


def subject(dtype: torch.dtype = torch.float32) -> Subject:
    """The demo's model on the CPU. Raises ConfigError SW-112 or SW-113."""
    folder = _folder()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    name = "SmolLM2-135M-Instruct" if "smollm2" in folder.name else folder.name
    return Subject(model.eval(), Text.of_model(folder), f"{name}, {str(dtype).removeprefix('torch.')}")


@cache
def _folder() -> Path:
    return prepare(None, shown())


def document(text: Text, task: str, tokens: int, number: int = 0) -> Document:
    """One of the fidelity suite's, always the same for the same Python."""
    return tasks.document(task, text, tokens, SEED, number)


def prose(text: Text, tokens: int, number: int = 0) -> torch.Tensor:
    """[1, tokens] ids of English."""
    return row(document(text, f"nat({max(1, tokens // 2)})", tokens - tokens // 2, number))


def row(made: Document, more: int | None = None) -> torch.Tensor:
    """[1, n] ids: the prompt and the first `more` tokens of its continuation, all of them if None."""
    return torch.tensor([[*made.prompt, *made.continuation[:more]]])


def one(what: str, unit: str, value: float, target: Target | None = None, beside: str = "", **more: Any) -> Row:
    """A row of a value that is counted or bounded rather than sampled: its interval is itself."""
    return Row(what, unit, Estimate(value, value, value, 1), target, beside, more)


def left_out(what: str, unit: str, target: Target | None, why: str) -> Row:
    return Row(what, unit, None, target, why)


def on_disk(folder: str | Path, gib: int) -> str:
    """A place for the disk tier."""
    return f"{folder}:{gib}GiB"


def joined(parts: Sequence[str]) -> str:
    return ", ".join(part for part in parts if part)
