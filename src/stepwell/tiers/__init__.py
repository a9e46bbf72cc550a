"""Levels below the arena behind one small interface."""
