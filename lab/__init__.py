"""What measures stepwell and what tries to break it: run from a clone of the repository, and in no wheel.

It may import all of stepwell, and stepwell imports nothing of it.

    bench   how fast it is: `python -m lab.bench`, `make bench`
    trust   whether its promises hold: `python -m lab.trust`, `make trust`
    sim     the well in a simulated world, which a seed repeats: `python -m lab.sim`
    rig     pretended members of a session, real wells under test, and code that is switched off
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
