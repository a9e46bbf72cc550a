"""Lives of real wells and engines that are killed, starved and hindered, and what the next life makes of it.

`forks` and `processes` start them, `engine` is a light engine whose bytes follow from their identity, `ground` is where
they live. The campaign `trust/kills.py` and tests/kernel use the same.
"""

from __future__ import annotations
