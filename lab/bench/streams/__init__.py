"""Recalls that are streamed: what they take beside staged ones and a bare read, and where the time of one goes."""
