"""`python victim.py HOME DEVICE`: an engine with registered slabs that spills and recalls until it is killed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.engines import hashing, prompts


def main() -> None:
    home, device = sys.argv[1:]
    with hashing(Path(home), device, ahead=True) as (engine, _):
        asked = prompts(4, seed=9)
        for prompt in asked:
            engine.serve(prompt, 4)
        print("ready", flush=True)
        while True:
            engine.pool.forget()
            for prompt in asked:
                engine.add(prompt, 4)
            engine.run()


if __name__ == "__main__":
    main()
