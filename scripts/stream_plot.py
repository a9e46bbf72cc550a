"""Draws docs/stream.svg from benchmarks/results/stream.json: when each block of a streamed recall is read, opened,
heard of and copied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PLOT = ROOT / "benchmarks/results/stream.json", ROOT / "docs/stream.svg"
KINDS = {
    "read": ("#0b6e99", "read from disk"),
    "opened": ("#c2410c", "opened: decrypted and verified"),
    "heard": ("#18181b", "the worker hears that it has landed"),
    "copied": ("#65a30d", "copied to the engine's memory"),
}
WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 860, 62, 16, 34, 17, 12
GREY, INK = "#d4d4d8", "#3f3f46"
STEPS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500)


def draw(blocks: list[dict[str, Any]]) -> str:
    end = max(block["copied"][1] for block in blocks)
    step = next((step for step in STEPS_MS if end / step <= 12), STEPS_MS[-1])
    bottom, scale = TOP + ROW * len(blocks), (WIDTH - LEFT - RIGHT) / end
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 44}" role="img" '
        f'aria-label="A streamed recall, block by block" font-family="sans-serif" font-size="11" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{bottom + 44}" fill="#ffffff"/>',
    ]
    for at, (colour, label) in enumerate(KINDS.values()):
        x = LEFT + at * (WIDTH - LEFT - RIGHT) / len(KINDS)
        parts.append(f'<rect x="{x:.1f}" y="10" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 15:.1f}" y="19">{label}</text>')
    for ms in range(0, int(end) + 1, step):
        x = LEFT + ms * scale
        parts.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="{GREY}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{ms}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{bottom + 34}" text-anchor="middle">ms since the run was asked for</text>')
    for block in blocks:
        y = TOP + ROW * block["block"] + (ROW - BAR) / 2
        parts.append(f'<text x="{LEFT - 8}" y="{y + BAR - 2:.1f}" text-anchor="end">block {block["block"]}</text>')
        heard = block["heard"], block["heard"] + 2 / scale
        spans = {"read": block["read"], "opened": block["opened"], "copied": [block["copied"]], "heard": [heard]}
        for kind, (start, stop) in ((kind, span) for kind, found in spans.items() for span in found):
            x, width = LEFT + start * scale, max(1.0, (stop - start) * scale)
            colour = KINDS[kind][0]
            parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PLOT.write_text(draw(json.loads(RESULTS.read_text())["timeline"]))
