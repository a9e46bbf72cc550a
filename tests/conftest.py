"""Settings for the whole suite."""

from __future__ import annotations

from hypothesis import settings

# Random on every run, so that many runs see more than one. A failure prints what repeats it.
settings.register_profile("ci", derandomize=False, print_blob=True, deadline=None)
settings.load_profile("ci")
