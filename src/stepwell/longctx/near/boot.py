"""Where the process that scores near the data begins: run as a file, so that nothing is imported before."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any


def light_package(name: str) -> None:
    """Registers `name` as a module without running its `__init__`, which loads transformers: seconds and hundreds of
    megabytes that nothing here needs. An attribute access loads the whole package after all, as a custom key index may
    need."""
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
