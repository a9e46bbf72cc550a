"""The engine side of the socket. Light: numpy, msgspec, blake3 and the standard library."""
