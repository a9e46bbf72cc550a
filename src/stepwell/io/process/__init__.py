"""This process: threads of its own, descriptors that it receives, its core dumps, and its end."""
