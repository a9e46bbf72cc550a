"""Where the process that scores near the data begins: run as a file, so that nothing is imported before."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any


def light_package(name: str) -> None:
    """Puts `name` among the modules without running its `__init__`, which loads transformers: seconds and hundreds of
    megabytes that nothing here needs. Whoever asks it for a name after all (a key index of one's own may) gets the
    whole of it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    package, run = importlib.util.module_from_spec(spec), spec.loader.exec_module

    def whole(wanted: str) -> Any:
        del package.__dict__["__getattr__"]
        run(package)
        return getattr(package, wanted)

    package.__dict__["__getattr__"] = whole
    sys.modules[name] = package


if __name__ == "__main__":
    light_package("stepwell.longctx")
    from stepwell.longctx.near.child import main

    main(*map(int, sys.argv[1:]))
