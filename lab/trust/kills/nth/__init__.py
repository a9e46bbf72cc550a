"""Lives that end, fail or are lied to at the N-th system call of a kind."""

from __future__ import annotations
