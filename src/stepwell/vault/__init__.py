"""The keyring of a well, and keys derived from it. Only the well imports this package: engines hold no keys."""

from __future__ import annotations

from stepwell.vault.keyring import Keyring, TenantKeys

__all__ = ["Keyring", "TenantKeys"]
