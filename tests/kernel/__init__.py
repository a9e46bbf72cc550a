"""Faults of the real kernel, on real processes: what `stepwell.trust` does in numbers, here a few of each kind."""
