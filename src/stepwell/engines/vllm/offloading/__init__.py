"""stepwell as a secondary tier below vLLM's own CPU offloading (the second door).

vLLM copies KV between its pages and rows of host memory, on whatever device it supports and for whatever model it
serves; a row holds one chunk of tokens, the shards of all ranks side by side. This package moves rows between that
memory and a well, from the scheduler's process:

    lookup ──► lookups: one question to the well per run of keys ──► HIT
    submit_load, submit_store ──► transfers: threads copy between slots and rows ──► get_finished_jobs

`tier` (one level up) is the class that vLLM makes: it translates between vLLM's types and these, counts for vLLM's
metrics and events, and lets no exception out.
"""
