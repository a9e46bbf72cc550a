"""Curves as SVG: a logarithmic axis of bytes, a linear one of quality, a line with intervals for each policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#0b6e99", "#c2410c", "#4d7c0f", "#7e22ce", "#b91c1c", "#0f766e", "#a16207", "#be185d", "#475569", "#1d4ed8")
_WIDTH, _HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 30, 44
Scale = Callable[[float], float]
_GREY, _INK = "#d4d4d8", "#3f3f46"


@dataclass(frozen=True, slots=True)
class PlotMark:
    """A point with the ends of its interval."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PlotLine:
    """A line of a chart. `level`: a horizontal line at the mark's height, for a value that does not depend on bytes."""

    name: str
    marks: Sequence[PlotMark]
    level: bool = False


def chart(title: str, x_label: str, y_label: str, lines: Sequence[PlotLine]) -> str:
    """A chart as one SVG element. Marks with an x that is not positive are left out of curves."""
    curves = [(line, [m for m in line.marks if line.level or m.x > 0]) for line in lines]
    xs = [mark.x for line, marks in curves if not line.level for mark in marks] or [1.0]
    ys = [y for _, marks in curves for mark in marks for y in (mark.low, mark.y, mark.high)] or [0.0, 1.0]
    low_x, high_x = math.floor(math.log10(min(xs))), math.ceil(math.log10(max(xs)))
    high_x = max(high_x, low_x + 1)
    low_y, high_y, step = _rounded(min(ys), max(ys))

    def at_x(x: float) -> float:
        return _LEFT + (math.log10(x) - low_x) / (high_x - low_x) * (_WIDTH - _LEFT - _RIGHT)

    def at_y(y: float) -> float:
        return _HEIGHT - _BOTTOM - (y - low_y) / (high_y - low_y) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title)}" font-family="sans-serif" font-size="11" fill="{_INK}">',
        f'<text x="{_WIDTH / 2}" y="16" text-anchor="middle" font-size="13">{escape(title)}</text>',
        f'<text x="{(_WIDTH + _LEFT) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text x="14" y="{_HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 14 {_HEIGHT / 2})">'
        f"{escape(y_label)}</text>",
    ]
    for power in range(low_x, high_x + 1):
        x = at_x(10.0**power)
        parts.append(_rule(x, _TOP, x, _HEIGHT - _BOTTOM))
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 14}" text-anchor="middle">{_power(power)}</text>')
    for number in range(round((high_y - low_y) / step) + 1):
        y = at_y(low_y + number * step)
        parts.append(_rule(_LEFT, y, _WIDTH - _RIGHT, y))
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{low_y + number * step:.4g}</text>')
    for number, (line, marks) in enumerate(curves):
        parts += _drawn(line, marks, COLOURS[number % len(COLOURS)], at_x, at_y)
    return "\n".join([*parts, "</svg>"])


def legend(names: Sequence[str]) -> str:
    """The legend, in the order of the lines, which determines their colours."""
    items = (
        f'<span><i style="background:{COLOURS[number % len(COLOURS)]}"></i>{escape(name)}</span>'
        for number, name in enumerate(names)
    )
    return f'<p class="legend">{" ".join(items)}</p>'


def _drawn(line: PlotLine, marks: Sequence[PlotMark], colour: str, at_x: Scale, at_y: Scale) -> list[str]:
    if line.level:
        found = []
        for mark in marks:
            y = at_y(mark.y)
            found.append(
                f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="{colour}" '
                f'stroke-width="1.5" stroke-dasharray="5 4"><title>{escape(line.name)}: {mark.y:.4g}</title></line>'
            )
        return found
    ordered = sorted(marks, key=lambda mark: mark.x)
    path = " ".join(f"{at_x(mark.x):.1f},{at_y(mark.y):.1f}" for mark in ordered)
    found = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>'] if path else []
    for mark in ordered:
        x, y = at_x(mark.x), at_y(mark.y)
        told = f"{line.name}: {mark.y:.4g} ({mark.low:.4g} to {mark.high:.4g}) at {mark.x:.3g}"
        found.append(
            f'<line x1="{x:.1f}" y1="{at_y(mark.low):.1f}" x2="{x:.1f}" y2="{at_y(mark.high):.1f}" '
            f'stroke="{colour}" stroke-width="1"/>'
        )
        found.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{colour}"><title>{escape(told)}</title></circle>'
        )
    return found


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{_GREY}" stroke-width="0.6"/>'


def _rounded(low: float, high: float) -> tuple[float, float, float]:
    """Ends of an axis and the step between its rules: 1, 2 or 5 times a power of ten, four to ten of them."""
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(power * times for times in (1, 2, 5, 10) if (high - low) / (power * times) <= 6)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, step


def _power(power: int) -> str:
    return f"{10.0**power:g}" if -3 <= power <= 3 else f"1e{power}"
