"""The Prometheus text format, version 0.0.4: families of samples in, one page of text out.

Knows nothing of stepwell. Names are the caller's to choose; help and label values are escaped, so that whatever a label
holds is one value of one sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Kind = Literal["counter", "gauge"]


@dataclass(frozen=True, slots=True)
class Sample:
    labels: Mapping[str, str]
    value: int | float


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric with all its samples."""

    name: str
    kind: Kind
    help: str
    samples: list[Sample]


def render(families: Iterable[MetricFamily]) -> str:
    """The page. A family without samples is left out; two of one name would be an error of the caller's."""
    lines: list[str] = []
    for family in families:
        if not family.samples:
            continue
        lines.append(f"# HELP {family.name} {_escaped(family.help)}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for sample in family.samples:
            labels = ",".join(f'{name}="{_quoted(value)}"' for name, value in sample.labels.items())
            lines.append(f"{family.name}{{{labels}}} {number(sample.value)}" if labels else _bare(family, sample))
    return "".join(f"{line}\n" for line in lines)


def number(value: int | float) -> str:
    """The number with all its digits, in a form that Go's ParseFloat reads."""
    if isinstance(value, int):
        return str(int(value))  # True is 1
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


def _bare(family: MetricFamily, sample: Sample) -> str:
    return f"{family.name} {number(sample.value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', '\\"')
