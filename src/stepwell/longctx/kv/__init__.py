"""The KV of one layer across the tiers, and what layers share."""
