"""Copies on a GPU: `copies` over a `device`, of which `cuda` is one; `method` chooses copy engine or `kernel`."""

from __future__ import annotations
