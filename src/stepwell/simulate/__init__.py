"""`stepwell simulate`: what would be kept and recalled if policies, tiers or loads were others. A program.

`trace` is what is replayed; `load` reads one from a file (`formats`) or makes one (`generator`).
"""

from __future__ import annotations
