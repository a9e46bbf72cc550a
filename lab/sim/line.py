"""A connection between one member of an engine and the well: what is sent takes its time, and either end may go."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

from lab.sim.life import Life
from stepwell.block.namespace import DEFAULT_TENANT
from stepwell.hierarchy.sessions.session import Member, Peer
from stepwell.protocol import messages as m
from stepwell.protocol.link import Receiver

Heard = Callable[["Line", m.Message], None]


class Line:
    """The engine's `Link`; for the well, what its sockets are. Nothing arrives before `up` or `down` is called; each
    delivers one message, or the end. `heard` is told of each message that arrives, just before. `process` is a number.
    """

    def __init__(self, life: Life, process: int, hello: m.Hello, receiver: Receiver, heard: Heard) -> None:
        self.life = life
        self.process = process
        self.member: Member | None = None
        self._receiver: Receiver | None = receiver
        self._heard = heard
        self._up: deque[m.Message | None] = deque([hello])  # None: the end
        self._down: deque[tuple[m.Message | None, list[int]]] = deque()
        self._served = True  # the well has not seen the end, nor made it

    # the engine's side ------------------------------------------------------------------------------------------------

    def post(self, message: m.Message) -> None:
        if self._receiver is not None:
            self._up.append(message)

    def close(self) -> None:
        if self._receiver is not None:
            self._up.append(None)
            self._lose()

    def _lose(self) -> None:
        receiver, self._receiver = self._receiver, None
        while self._down:
            _close(self._down.popleft()[1])
        if receiver is not None:
            receiver.lost()

    # both -------------------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Both ends will notice; what was sent before may or may not arrive."""
        self._up.append(None)
        self._down.append((None, []))

    @property
    def over(self) -> bool:
        """Both ends have seen the end."""
        return self._receiver is None and not (self._served and self.life.alive)

    def up(self) -> bool:
        """Delivers one message to the well. False: there is none."""
        if not (self._up and self._served and self.life.alive):
            return False
        message = self._up.popleft()
        hierarchy = self.life.hierarchy
        if message is not None:
            self._heard(self, message)
        if isinstance(message, m.Hello):
            self.member = hierarchy.join(Peer(0, self.process, True, DEFAULT_TENANT), message, self)
            if self.member is None:
                self.sever()
        elif message is None:
            self._served = False
            if self.member is not None:
                hierarchy.left(self.member)
        elif self.member is not None:
            hierarchy.handle(self.member, message)  # type: ignore[arg-type]
        return True

    def down(self) -> bool:
        """Delivers one message to the engine. False: there is none."""
        if not self._down:
            return False
        message, fds = self._down.popleft()
        if message is None or self._receiver is None:
            _close(fds)
            self._lose()
        else:
            self._heard(self, message)
            self._receiver.received(message, fds)  # type: ignore[arg-type]
        return True

    # the well's side --------------------------------------------------------------------------------------------------

    def send(self, message: m.Message, fds: tuple[int, ...] = ()) -> None:
        if self._served and self._receiver is not None:
            self._down.append((message, [os.dup(fd) for fd in fds]))

    def sever(self) -> None:
        self._served = False
        self._down.append((None, []))

    def well_gone(self) -> None:
        """What it has sent still arrives, then the end."""
        self._down.append((None, []))


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
