"""The versions of vLLM that the adapter is tested with. Others are warned about, never refused."""

from __future__ import annotations

TESTED = ("0.31", "0.32")


def is_tested(version: str) -> bool:
    """Whether `version` (such as "0.32.0" or "0.32.1rc2+cpu") is a release of one of the tested ones."""
    return ".".join(version.split(".")[:2]) in TESTED
