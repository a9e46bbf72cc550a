"""What all messages are: msgspec structs, arrays on the wire, tagged by class name."""

from __future__ import annotations

from typing import Annotated

import msgspec

from stepwell.protocol.limits import MAX_LISTED

Numbers = Annotated[list[int], msgspec.Meta(max_length=MAX_LISTED)]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""
