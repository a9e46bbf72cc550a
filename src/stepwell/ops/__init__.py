"""What an operator asks of a machine and of what lies on it, beside the running well."""

from __future__ import annotations
