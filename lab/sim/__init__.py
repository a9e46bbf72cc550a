"""Deterministic simulation: the whole well, its disk tier and its engines in one thread, from one seed.

    engines (real clients) ──lines──► Hierarchy ──jobs──► fibres ──► DiskTier ──► simulated files ──► simulated disk
         │                                                                                              │
         └──────────────── oracle: every recall is what was spilled under that identity ◄── power cuts ─┘

What is simulated is what a test cannot command: time, threads, sockets, processes, files and what becomes of them when
the power goes. All the rest is what runs in production: state machine, tier, frames, keys, both clients with their
patience, shared memory. The same seed gives the same run, byte by byte, in any process:
`python -m lab.sim --seed N`.

`walk` draws thousands of steps in which everything may go wrong; `cuts` opens a fresh well on what a disk may hold
after a power cut at this moment, and recalls everything that was ever spilled. What they find is a `Violation`.
"""

from __future__ import annotations
