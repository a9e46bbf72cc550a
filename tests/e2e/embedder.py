"""An engine that embeds, in a process of its own: `python embedder.py ARGUMENTS_AS_JSON TEXTS_AS_JSON`.

It embeds the texts three times over, and forgets its own prefix cache in between: by text, and token by token where its
pooling allows both. Prints vectors and cached tokens as a line of JSON, the last one.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

ROUNDS = 3
PATIENCE_S = 60.0


def main() -> None:
    arguments, texts = map(json.loads, sys.argv[1:3])
    import vllm

    engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))
    config = engine.vllm_config
    numbers = itertools.count()

    def ask(tokens: list[int], task: str) -> dict[str, Any]:
        engine.add_request(str(next(numbers)), {"prompt_token_ids": tokens}, vllm.PoolingParams(task=task))
        while not (outputs := engine.step()):
            pass
        return {"vectors": outputs[0].outputs.data.tolist(), "cached": outputs[0].num_cached_tokens or 0}

    def until(holds: Any) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def recalls() -> bool:
        until(engine.reset_prefix_cache)
        return ask([100 + n % 50 for n in range(300)], "embed")["cached"] > 0

    tasks = ["embed", "token_embed"] if config.cache_config.enable_prefix_caching else ["embed"]
    if config.kv_transfer_config is not None and len(tasks) > 1:
        until(recalls)  # it knows the weights, the well is there and has room
    rounds = []
    for _ in range(ROUNDS):
        until(engine.reset_prefix_cache)
        rounds.append({task: [ask(tokens, task) for tokens in texts] for task in tasks})
    print("\n" + json.dumps({"rounds": rounds}), flush=True)


if __name__ == "__main__":
    main()
