"""The connector's half beside vLLM's scheduler: `half` takes its hooks, with `live`, `recalls` and `spills`."""

from __future__ import annotations
