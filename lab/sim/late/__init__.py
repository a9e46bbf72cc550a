"""Reads that are late: how long requests should wait for them. `python -m lab.sim.late`."""
