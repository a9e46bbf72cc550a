"""What to keep where, and what to recall or recompute: pure functions and small machines of numbers.

No I/O, no clock, no threads: the same objects run in the well and in the simulator.
"""
