"""Measurements on a GPU, where vLLM cannot be had as well: on the small engine of `engine`.

`benchmarks/gpu.py` runs `copies`, `interference` and `recall`. With the device "cpu" all of it runs in a tiny shape: it
shows that the code works, and measures nothing.
"""

from __future__ import annotations
