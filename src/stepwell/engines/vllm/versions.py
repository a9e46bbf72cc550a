"""The versions of vLLM that the adapter is tested with. Others are warned about, never refused."""

from __future__ import annotations

from stepwell.errors import Unsupported

TESTED = ("0.31", "0.32")


def is_tested(version: str) -> bool:
    """Whether `version` (such as "0.32.0" or "0.32.1rc2+cpu") is a release of one of the tested ones."""
    return ".".join(version.split(".")[:2]) in TESTED


def lacking(error: Exception) -> Unsupported:
    """What to tell people of an exception that the construction of a connector or tier has raised."""
    return Unsupported(
        "SW-710",
        what="this vLLM lacks an interface that stepwell needs",
        why=f"{type(error).__name__}: {error}",
        fix=f"use vLLM {TESTED[-1]}, the newest version that stepwell was tested with",
    )
