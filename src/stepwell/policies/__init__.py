"""Policies: placement, eviction, writing, and recall or recompute, as pure functions and small state machines.

No I/O, no clock, no threads: the same objects run in the well and in the simulator.
"""
