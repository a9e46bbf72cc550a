"""Replay of models that keep windows or states beside the layers that need every token."""
