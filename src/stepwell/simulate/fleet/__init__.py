"""Fleets on one virtual clock: engines, the tiers of their hosts, and the routing of requests.

`description` is the YAML, `run` plays a trace on it, `results` reports. See docs/fleet.md for what is modelled and what
is not.
"""

from __future__ import annotations
