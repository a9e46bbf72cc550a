"""Contexts that are kept in files."""
