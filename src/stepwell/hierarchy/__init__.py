"""The well without its process: index, residency, arena, sessions, as one single-threaded state machine."""
