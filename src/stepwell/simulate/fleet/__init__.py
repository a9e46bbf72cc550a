"""Whole fleets on one virtual clock: engines, what lies below them on their hosts, and who sends a request where.

`description` is the YAML, `run` plays a trace on it, `results` says what came out. See docs/fleet.md for what is
modelled and what is not.
"""

from __future__ import annotations
