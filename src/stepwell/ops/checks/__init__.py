"""Checks of `stepwell doctor`, one subject a file."""
