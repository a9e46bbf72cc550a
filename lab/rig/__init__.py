"""Apparatus: members of a session that are played by hand, real wells under test, and modules with some code off."""
