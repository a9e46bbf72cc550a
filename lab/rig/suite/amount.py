"""How much a test tries: a little each time, and a lot where there is time for it."""

from __future__ import annotations

import pytest


def some_or_many(name: str, some: int, many: int) -> pytest.MarkDecorator:
    """The argument `name`: `some` in the quick suite, `many` in `make nightly`. For tests that draw anew in each run:
    many quick runs see what one long run does."""
    return pytest.mark.parametrize(name, [some, pytest.param(many, marks=pytest.mark.nightly)], ids=["some", "many"])
