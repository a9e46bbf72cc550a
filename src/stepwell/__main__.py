"""`python -m stepwell`: the same as the `stepwell` command."""

from __future__ import annotations

from stepwell.cli.main import main

if __name__ == "__main__":
    main()
