"""Fetching cold pages to the device of the model."""
