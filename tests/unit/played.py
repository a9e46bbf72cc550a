"""A well that the test plays by hand."""

from __future__ import annotations

from stepwell.protocol import messages as m
from stepwell.protocol.link import Link, Receiver


class PlayedWell:
    """Takes every hello and keeps what is posted; the test answers."""

    def __init__(self) -> None:
        self.said: list[m.Message] = []
        self.receivers: list[Receiver] = []
        self.closed = 0

    def dial(self, hello: m.Hello, receiver: Receiver) -> Link:
        self.said.append(hello)
        self.receivers.append(receiver)
        return self

    def post(self, message: m.Message) -> None:
        self.said.append(message)

    def close(self) -> None:
        self.closed += 1
