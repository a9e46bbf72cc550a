"""The engine's end of the socket against peers that behave as no well should, and against forks."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from wells import PATIENCE, Recorder, open_files, worker

from stepwell.client import socket as client
from stepwell.errors import CODES, AccessDenied, BackendDown, ProtocolError, as_error
from stepwell.protocol import wire
from stepwell.protocol.messages import Ask, Hello, Message, Ping, Pong, Refused, SlabRetired, SlabShared, Welcome


class Peer:
    """Listens like a well; what it says is up to the test."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "well.sock"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.path))
        self.listener.listen(1)
        self.sock = self.listener
        self._reader = wire.Reader(wire.from_engine)

    def accept(self) -> None:
        self.sock, _ = self.listener.accept()
        self.sock.settimeout(PATIENCE)

    def say(self, *messages: Message, fds: tuple[int, ...] = ()) -> None:
        socket.send_fds(self.sock, [b"".join(wire.frame(message) for message in messages)], fds)

    def hear(self, count: int) -> list[Message]:
        heard: list[Message] = []
        while len(heard) < count:
            data = self.sock.recv(1 << 16)
            assert data, heard
            heard += self._reader.feed(data)
        return heard

    def close(self) -> None:
        self.sock.close()
        self.listener.close()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    listening = Peer(tmp_path)
    yield listening
    listening.close()


def greeted(peer: Peer) -> tuple[client.SocketLink, Recorder]:
    receiver = Recorder()
    link = client.dial(peer.path)(worker(), receiver)
    assert isinstance(link, client.SocketLink)
    peer.accept()
    (hello,) = peer.hear(1)
    assert isinstance(hello, Hello)
    peer.say(Welcome(1, 1, "test", 0))
    receiver.next(Welcome)
    return link, receiver


def post_all(link: client.SocketLink, messages: list[Ask]) -> None:
    for message in messages:
        link.post(message)


def test_messages_go_both_ways_until_one_end_closes(peer: Peer) -> None:
    link, receiver = greeted(peer)
    link.post(Ping(1))
    assert peer.hear(1) == [Ping(1)]
    peer.say(Pong(1), Pong(2))
    assert [receiver.next(Pong)[0].number for _ in range(2)] == [1, 2]
    peer.sock.close()
    assert receiver.ended.wait(PATIENCE)
    link.post(Ping(2))
    link.close()
    link.close()
    assert receiver.lost_calls == 1
    assert link.reason is not None and link.reason.code == "SW-504"


def test_closing_loses_the_link_once_and_without_a_reason(peer: Peer) -> None:
    link, receiver = greeted(peer)
    link.close()
    assert receiver.ended.wait(PATIENCE)
    link.close()
    assert peer.sock.recv(1) == b""
    assert (receiver.lost_calls, link.reason) == (1, None)


def test_an_unanswered_hello_is_given_up(peer: Peer) -> None:
    """A well under SIGSTOP looks like this: the kernel connects and takes bytes, nobody answers."""
    receiver = Recorder()
    link = client.dial(peer.path)(worker(), receiver)
    assert isinstance(link, client.SocketLink)
    for n in range(1000):
        link.post(Ask(n, 0, n, bytes(3200)))  # far beyond what the socket takes
    assert receiver.ended.wait(PATIENCE)
    assert link.reason is not None and link.reason.code == "SW-503"
    assert "not answered" in link.reason.why


def test_nobody_listens(tmp_path: Path, peer: Peer) -> None:
    with pytest.raises(BackendDown) as caught:
        client.dial(tmp_path / "none.sock")(worker(), Recorder())
    assert caught.value.code == "SW-505"
    peer.close()
    with pytest.raises(BackendDown) as caught:
        client.dial(peer.path)(worker(), Recorder())
    assert caught.value.code == "SW-505"


def test_a_full_queue_of_connections_is_not_waited_for(peer: Peer) -> None:
    waiting = []
    with pytest.raises(BackendDown) as caught:
        while True:
            waiting.append(client.connect(peer.path))
    assert caught.value.code == "SW-503"
    for sock in waiting:
        sock.close()


def test_what_a_slow_well_has_not_read_arrives_whole_and_in_order(peer: Peer) -> None:
    link, _ = greeted(peer)
    asks = [Ask(n, 0, n, bytes([n]) * 320_000) for n in range(60)]
    posting = [threading.Thread(target=post_all, args=(link, part)) for part in (asks[:30], asks[30:])]
    for thread in posting:
        thread.start()
    for thread in posting:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "posting waits for nobody"
    heard = peer.hear(60)
    assert sorted(heard, key=lambda ask: ask.ticket if isinstance(ask, Ask) else -1) == asks
    for part in (asks[:30], asks[30:]):
        assert [ask for ask in heard if ask in part] == part
    link.close()


@pytest.mark.parametrize(("bound", "value"), [("MAX_QUEUED_BYTES", 1 << 20), ("MAX_QUEUED_MESSAGES", 10)])
def test_a_well_that_never_reads_is_given_up(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, bound: str, value: int
) -> None:
    monkeypatch.setattr(client, bound, value)
    link, receiver = greeted(peer)
    for n in range(1000):
        link.post(Ask(n, 0, n, bytes(32_000)))
    assert receiver.ended.wait(PATIENCE)
    assert link.reason is not None and link.reason.code == "SW-504"
    assert "queue is full" in link.reason.why


def test_slabs_get_their_descriptors_in_order(peer: Peer) -> None:
    link, receiver = greeted(peer)
    files = [os.memfd_create(f"slab-{n}") for n in range(6)]
    for n, fd in enumerate(files):
        peer.say(Pong(n))
        peer.say(SlabShared(n, 1, 0, 1, 1), SlabRetired(99), fds=(fd,))
    for n in range(6):
        receiver.next(Pong)
        slab, fds = receiver.next(SlabShared)
        assert slab.slab == n
        assert f"slab-{n} " in os.readlink(f"/proc/self/fd/{fds[0]}")
        assert not os.get_inheritable(fds[0])
        os.close(fds[0])
        assert receiver.next(SlabRetired)[1] == ()
    for fd in files:
        os.close(fd)
    link.close()


def test_a_slab_without_its_descriptor_ends_the_link(peer: Peer) -> None:
    link, receiver = greeted(peer)
    peer.say(SlabShared(1, 1, 0, 1, 1))
    assert receiver.ended.wait(PATIENCE)
    assert link.reason is not None and link.reason.code == "SW-805"
    assert receiver.next(Refused)[0].code == "SW-805", "whoever reads the engine's log is to know"


def test_a_well_that_talks_nonsense_is_left(peer: Peer) -> None:
    link, receiver = greeted(peer)
    peer.sock.sendall(b"\x03\0\0\0\xc1\xc1\xc1")
    assert receiver.ended.wait(PATIENCE)
    assert link.reason is not None and link.reason.code == "SW-803"


def test_a_refusal_is_read_although_the_well_has_closed(peer: Peer) -> None:
    receiver = Recorder()

    def refuse() -> None:
        peer.accept()
        peer.say(Refused("SW-606", "a", "b", "c"))
        peer.sock.close()

    closed = threading.Thread(target=refuse)
    closed.start()
    link = client.dial(peer.path)(worker(), receiver)
    closed.join(PATIENCE)
    link.post(Ping(1))
    assert receiver.next(Refused)[0].code == "SW-606"
    assert receiver.ended.wait(PATIENCE)


def test_links_leave_no_descriptor_behind(peer: Peer) -> None:
    before = open_files()
    for _ in range(20):
        link, receiver = greeted(peer)
        link.close()
        assert receiver.ended.wait(PATIENCE)
        peer.sock.close()
    assert open_files() == before


def test_a_forked_child_neither_uses_nor_keeps_the_parents_link(peer: Peer) -> None:
    link, receiver = greeted(peer)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(write)
            link.post(Ping(666))
            link.close()
            os.read(read, 1)  # lives until the parent lets it go
            status = 0
        finally:
            os._exit(status)
    os.close(read)
    link.post(Ping(1))
    assert peer.hear(1) == [Ping(1)]
    peer.say(Pong(1))
    receiver.next(Pong)
    link.close()
    assert peer.sock.recv(1) == b"", "the child holds no copy that keeps the connection open"
    os.close(write)
    assert os.waitpid(child, 0)[1] == 0


def test_a_socket_of_another_user_is_not_spoken_to(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    path = tmp_path / "well.sock"
    ready, write = os.pipe()
    alive, hold = os.pipe()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    child = os.fork()
    if child == 0:
        try:
            os.close(hold)
            os.setresuid(65534, 65534, 65534)
            listener.listen(1)  # the kernel remembers who listens
            os.write(write, b"!")
            os.read(alive, 1)
        finally:
            os._exit(0)
    os.read(ready, 1)
    with pytest.raises(AccessDenied) as caught:
        client.connect(path)
    assert caught.value.code == "SW-606"
    for fd in (hold, ready, write, alive):
        os.close(fd)
    listener.close()
    os.waitpid(child, 0)


def test_a_system_without_pidfds_is_named(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise PermissionError(1, "not allowed")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(ProtocolError) as caught:
        client.dial(peer.path)(worker(), Recorder())
    assert caught.value.code == "SW-805"
    assert "seccomp" in caught.value.fix


def test_every_code_of_a_well_becomes_an_error_again() -> None:
    for code in CODES:
        assert as_error(code, "a", "b", "c").code == code
    strange = as_error("SW-999", "a", "b", "c")
    assert strange.code == "SW-801" and "SW-999" in strange.what
