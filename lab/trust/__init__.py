"""`python -m lab.trust`: tries to break stepwell's promises and counts how often that worked.

Programs, not a library: each module `NAME.py` that `__main__` lists is a campaign with a `run(budget)` that yields
`report.Row`s: a promise, how many cases were tried, how many broke it. docs/trust.md says what is promised, what is
not, and which campaign tests what.
"""

from __future__ import annotations
