"""The well without its process, as one single-threaded state machine.

    arena/      host memory: slabs, slots, and which block lies where
    sessions/   connected engines, their identity and keys
    levels/     the tier below the arena: reads and writes, what they cost, what is written and fetched ahead
    requests/   recalls, spills and the decisions on them

Each folder may use those before it and `counters`, `pauses`, `saved` and `work`; all but arena/ also use `core`.
"""
