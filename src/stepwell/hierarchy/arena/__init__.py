"""Host memory: slabs of shared memory, their slots, the blocks in them, and what is remembered of past use."""
