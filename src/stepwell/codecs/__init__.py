"""Codecs: they change the form of bytes while copying them into buffers of the caller."""
