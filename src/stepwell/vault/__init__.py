"""Keys: the keyring of a well and what is derived from it. Only the well imports this; engines hold no keys."""

from __future__ import annotations

from stepwell.vault.keyring import Keyring, TenantKeys

__all__ = ["Keyring", "TenantKeys"]
