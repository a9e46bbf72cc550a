"""What the test suite itself needs: how its tests are shared out, how much they try, which devices they see."""

from __future__ import annotations
