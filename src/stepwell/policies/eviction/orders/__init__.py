"""Orders of items that eviction policies share."""
