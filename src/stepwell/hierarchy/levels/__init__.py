"""The tiers below the arena: their reads and writes, health and speed, and what is moved ahead of need."""
