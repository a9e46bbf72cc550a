"""Models here are tiny: one thread computes them faster than several, and leaves the others to other tests."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
