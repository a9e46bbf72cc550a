"""What must hold on a GPU. The same tests run on a CPU in the ordinary suite; `make test-gpu` runs both."""

from __future__ import annotations
