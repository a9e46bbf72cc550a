"""`stepwell simulate`: what other policies, tiers or loads would keep and recall. A program.

`traces` holds the requests, read from files (`formats`) or made (`generator`); `replay` plays them against one tier,
`sweep` against many, `fleet` against a whole fleet.
"""

from __future__ import annotations
