"""The key of saved contexts, one for all of them, in stepwell's home."""

from __future__ import annotations

from pathlib import Path

from stepwell.io.paths import prepare_home
from stepwell.vault.keyfile import CONTEXT_KEY_NAME, open_key


def context_key(home: Path) -> memoryview:
    """32 bytes, made and kept in `home` (`longctx.key`, 0600) when they are first asked for. Whoever has them can read
    saved contexts; without them nobody can. `stepwell.io.paths.home_dir` says which home is meant.

    Raises AccessDenied SW-601 to SW-603 (home cannot be used or is not safe) and what `open_key` raises.
    """
    prepare_home(home)
    return open_key(home / CONTEXT_KEY_NAME)
