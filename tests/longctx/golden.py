"""The golden file of a saved context: what it is made of, made by the present writer from fixed inputs.

Run as a program (`python -m longctx.golden` in tests/) it writes it: only for a new version of the format, whose file
gets a name of its own.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch

from stepwell.longctx.saved.container import write_context

FOLDER = Path(__file__).parent.parent / "golden"
FILE = FOLDER / "context-2.ctx"
KEY = bytes(range(32))
FINGERPRINT = bytes(range(32, 64))
MANIFEST = {"fingerprint": FINGERPRINT, "tokens": 3, "turns": ["question", "answer"]}
TENSORS = {
    "0.keys": torch.arange(-6, 6, dtype=torch.float32).view(2, 3, 2) / 7,
    "0.values": torch.arange(12, dtype=torch.bfloat16).view(2, 3, 2),
    "ids": torch.tensor([1, -2, 1 << 40]),
    "none": torch.zeros(0, 5, dtype=torch.int8),
}


def write(path: Path) -> None:
    seeded = random.Random("golden context")
    write_context(path, KEY, MANIFEST, TENSORS, random=seeded.randbytes, now=lambda: 1_800_000_000.5)


if __name__ == "__main__":
    write(FILE)
