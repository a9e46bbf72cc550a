"""Costs of prefill and transfers, learned from measurements or taken from presets."""
