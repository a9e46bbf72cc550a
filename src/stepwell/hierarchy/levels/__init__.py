"""The tier below the arena: its reads and writes, their health and costs, and what is moved ahead of need."""
