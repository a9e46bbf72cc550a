"""How the engine side reaches a well, whichever way: over a socket or in the same process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from stepwell.protocol.messages import FromWell, Hello, Message


class Receiver(Protocol):
    """Gets what the well sends. Called on the link's own thread (in-process: on the caller's); must not block."""

    def received(self, message: FromWell, fds: Sequence[int]) -> None:
        """The receiver owns the descriptors and closes them."""

    def lost(self) -> None:
        """Called once when the link has ended, for whatever reason; nothing comes after it."""


class Link(Protocol):
    def post(self, message: Message) -> None:
        """Never blocks and never raises. After the link is lost messages are discarded."""

    def close(self) -> None:
        """Ends the link; idempotent. `lost` is called if it was not before."""


Dial = Callable[[Hello, Receiver], Link]
"""Opens a link and sends the hello with a pidfd of this process. Raises StepwellError when no well can be reached.
The answer (Welcome or Refused) comes to the receiver."""
