"""Harness engines over an in-process well: deterministic, no threads on the request path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepwell.engines.vllm.connector import StepwellConnector
from stepwell.hierarchy.local import LocalWell, open_well

from .build import Setup
from .harness import Harness


@contextmanager
def engines_on(well: LocalWell) -> Iterator[None]:
    """Connectors made in here join this well, without threads."""
    before = StepwellConnector.dialler, StepwellConnector.threaded
    StepwellConnector.dialler = staticmethod(lambda settings: lambda: well.dial)
    StepwellConnector.threaded = False
    try:
        yield
    finally:
        StepwellConnector.dialler, StepwellConnector.threaded = staticmethod(before[0]), before[1]


@contextmanager
def harness(tmp_path: Path, *, host: str | int = "32MiB", extra: dict[str, Any] | None = None, **setup: Any) -> Iterator[Harness]:
    """One engine on a well of its own. `h.well` is the well; its books are checked at the end."""
    with open_well(host) as well, engines_on(well):
        settings = Setup(
            "StepwellConnector",
            tmp_path / "model",
            extra={"home": str(tmp_path / "home"), "weights_id": "w", "block_tokens": setup.get("page", 16), **(extra or {})},
            **setup,
        )
        with Harness(settings) as h:
            h.well = well  # type: ignore[attr-defined]
            yield h
        well.check()
