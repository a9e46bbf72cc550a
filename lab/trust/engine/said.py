"""Whether anything that engines and their well have written tells what the engines were asked.

The processes know prompts as numbers of tokens and never as text: so it is those that are looked for, in the forms in
which a list of numbers is printed. What words planted in the other fields of messages come to: the campaign `secrets`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lab.trust.engine.prompts import Prompt
from lab.trust.report import Row

TOLD = "a real engine's and its well's files tell no prompt"

_RUN = 6
"""Tokens, one after the other, that are a part of one prompt and nothing else."""


def row(folder: Path, prompts: Sequence[Prompt], seed: int) -> Row:
    """Looks through all that lies below `folder` but the disk tier's segments, which are sealed."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".seg"]
    words = {form for prompt in prompts for form in _forms(prompt.tokens)}
    said = {path: path.read_bytes() for path in files}
    found = [f"{path.name} has {form.decode()}" for path, text in said.items() for form in words if form in text]
    logs = sum(path.suffix == ".log" for path in files)
    remark = f"{len(prompts)} prompts x {len(files)} files, {logs} of them logs, {sum(map(len, said.values())):,} bytes"
    return Row(TOLD, len(prompts) * len(files), len(found), seed, remark, found[:5])


def _forms(tokens: Sequence[int]) -> list[bytes]:
    """Of its beginning and its end."""
    runs = (tokens[:_RUN], tokens[-_RUN:])
    return [between.join(map(str, run)).encode() for run in runs for between in (", ", ",", " ")]
