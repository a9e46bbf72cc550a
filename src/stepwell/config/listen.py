"""Addresses for monitoring: the loopback interface or a Unix socket, never a network.

They have no password, so every user who can connect can read everything served there.
"""

from __future__ import annotations

import ipaddress
import os
import re

from stepwell.errors import ConfigError

_SOCKET_PATH_BYTES = 107  # sun_path has 108 bytes, one of them the closing NUL
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]{1,45})\]|([^\[\]:/\s]{1,253})):([0-9]{1,5})", re.ASCII)


def parse_listen(value: object) -> str:
    """`value` if it is the absolute path of a Unix socket, or HOST:PORT of the loopback interface.

    HOST is `localhost`, an address of 127.0.0.0/8 or [::1]; PORT is 1 to 65535. Raises ConfigError SW-102.
    """
    if not isinstance(value, str):
        raise _bad(f"a value of type {type(value).__name__} is not an address", "its form is not accepted")
    text = value.strip()
    if "\0" in text:
        raise _bad("an address with a NUL in it cannot be used", "no path or name can hold one")
    if text.startswith("/"):
        if len(os.fsencode(text)) > _SOCKET_PATH_BYTES:
            raise _bad(
                f"{text[:80]!r} is longer than the {_SOCKET_PATH_BYTES} bytes of a socket's path",
                "a limit of the system",
            )
        return text
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[3]) < 1 << 16:
        raise _bad(f"{text[:80]!r} is not an address with a port", "its form or port is not accepted")
    if not _is_loopback(match[1], match[2]):
        raise _bad(f"{text[:80]!r} is not a loopback address, and there is no password", "others could read it")
    return text


def _is_loopback(six: str | None, four: str | None) -> bool:
    if four == "localhost":
        return True
    try:
        address = ipaddress.IPv6Address(six) if six is not None else ipaddress.IPv4Address(four or "")
    except ValueError:
        return False
    return address.is_loopback


def split_listen(text: str) -> tuple[str, int] | str:
    """The parts of an address that `parse_listen` accepted, for `bind`: (host without brackets, port), or the path of a
    Unix socket."""
    if text.startswith("/"):
        return text
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def _bad(what: str, why: str) -> ConfigError:
    fix = "write 127.0.0.1:PORT, [::1]:PORT, localhost:PORT or the absolute path of a Unix socket; a scraper elsewhere"
    return ConfigError("SW-102", what=what, why=why, fix=f"{fix} needs a proxy of yours")
