"""The key of saved contexts, one for all of them, in stepwell's home."""

from __future__ import annotations

from pathlib import Path

from stepwell.io.paths import prepare_home
from stepwell.vault.keyfile import CONTEXT_KEY_NAME, open_key


def context_key(home: Path) -> memoryview:
    """The 32-byte key of saved contexts, made and kept in `home` (`longctx.key`, 0600) at its first use. It opens saved
    contexts, and nothing else does. `stepwell.io.paths.home_dir` gives the home. Raises AccessDenied SW-601 to SW-603
    (home cannot be used or is not safe) and the errors of `open_key`."""
    prepare_home(home)
    return open_key(home / CONTEXT_KEY_NAME)
