"""Recalls that share a tier: what they wait under one order of service or another. `python -m lab.sim.turns`."""
