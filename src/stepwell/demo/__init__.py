"""`stepwell demo`: a real engine, a real model, real documents, and what recalling their KV is worth.

A program, not a library: `run.run(DemoOptions())` does it, `report.show` prints it. `engine.Engine` drives a real vLLM
in processes of its own and serves the end-to-end tests and the benchmarks too. Nothing here is imported by an engine.
"""

from __future__ import annotations
