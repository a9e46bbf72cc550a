"""The well's loop with the real hierarchy behind it and real sockets before it."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from wells import MIB, PATIENCE, InThread, Raw, Recorder, eventually, open_files, scheduler, worker
from wells import well as well

from stepwell.block.namespace import DEFAULT_TENANT
from stepwell.client.socket import dial
from stepwell.config import Settings
from stepwell.errors import ConfigError
from stepwell.io.clock import MonotonicClock
from stepwell.protocol import wire
from stepwell.protocol.messages import (
    MAX_MESSAGE,
    PROTOCOL,
    Clear,
    Filled,
    Granted,
    Hello,
    Mapped,
    Message,
    NamespacesQuery,
    Ping,
    Pong,
    Ready,
    Refused,
    Report,
    Reserve,
    SlabShared,
    Stats,
    StatsQuery,
    Stop,
    Stopping,
    Welcome,
)
from stepwell.serve import loop as loop_module
from stepwell.serve.executor import ThreadExecutor, Wakeup
from stepwell.serve.loop import Linger
from stepwell.serve.options import judge
from stepwell.serve.server import connection as connection_module
from stepwell.serve.server import exits, listeners
from stepwell.serve.server import server as server_module
from stepwell.serve.server.connection import Connection, is_pidfd
from stepwell.serve.server.gates import Gate
from stepwell.serve.storage import Storage

ADMIN = Hello(PROTOCOL, "admin")


def admin(well: InThread) -> Raw:
    peer = Raw(well.path)
    peer.send(ADMIN)
    assert isinstance(peer.read(), Welcome)
    return peer


def stats(well: InThread) -> dict[str, int | float | str]:
    peer = admin(well)
    peer.send(StatsQuery())
    answer = peer.read()
    peer.close()
    assert isinstance(answer, Stats)
    return answer.values


def test_members_become_a_session_and_slabs_arrive_with_their_descriptors(well: InThread) -> None:
    first, second = Recorder(), Recorder()
    dial(well.path)(scheduler(), first)
    link = dial(well.path)(worker(), second)
    for member in (first, second):
        assert member.next(Welcome)[0].well == "test"
        member.next(Ready)
    slab, fds = second.next(SlabShared)
    assert os.fstat(fds[0]).st_size == slab.nbytes
    os.close(fds[0])
    assert stats(well)["sessions"] == 1
    link.close()
    assert first.ended.wait(PATIENCE), "a session ends for all its members"
    eventually(lambda: stats(well)["sessions"] == 0)


def test_another_protocol_version_is_refused_in_words(well: InThread) -> None:
    for hello in (scheduler(protocol=PROTOCOL + 1), Hello(PROTOCOL + 1, "admin"), Hello(0, "worker")):
        member = Recorder()
        dial(well.path)(hello, member)
        refused, _ = member.next(Refused)
        assert refused.code == "SW-801"
        assert f"protocol {hello.protocol}" in refused.what
        assert "same version" in refused.fix
        assert member.ended.wait(PATIENCE)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ((MAX_MESSAGE + 1).to_bytes(4, "little"), "SW-80"),
        ((3).to_bytes(4, "little") + b"\xc1\xc1\xc1", "SW-803"),
        (wire.frame(Pong(1)), "SW-803"),
        (wire.frame(Ping(1)), "SW-804"),
        (wire.frame(ADMIN) + wire.frame(Mapped(1)), "SW-804"),
        (wire.frame(ADMIN) + wire.frame(ADMIN), "SW-804"),
        (wire.frame(worker())[:-1] + b"\xff", "SW-80"),
        (MAX_MESSAGE.to_bytes(4, "little") + bytes(connection_module.MAX_HELLO), "SW-802"),
    ],
    ids=["oversized", "garbage", "a well's", "no hello", "not an admin's", "two hellos", "bad hello", "endless hello"],
)
def test_a_malformed_stream_ends_its_connection_and_nothing_else(well: InThread, sent: bytes, code: str) -> None:
    peer = Raw(well.path)
    peer.sock.sendall(sent)
    answer = peer.read()
    if isinstance(answer, Welcome):
        answer = peer.read()
    assert isinstance(answer, Refused)
    assert answer.code.startswith(code)
    assert peer.read() is None
    peer.close()
    assert stats(well)["connections"] == 1


def test_counts_that_an_engine_reports_can_be_told_whatever_it_says(well: InThread) -> None:
    """No number that a message brings is too large for the answer that has it in a sum."""
    engine = Raw(well.path)
    engine.send(scheduler(), *[Report({"late": 2**64 - 1, "odd": -(2**63)})] * 3)
    assert isinstance(engine.read(), Welcome)
    eventually(lambda: stats(well).get("engine_late") == 2**63 - 1)
    assert stats(well)["engine_odd"] == 0
    engine.close()


def test_silence_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HELLO_SECONDS", 0.05)
    well = InThread(tmp_path)
    greeted = admin(well)
    silent, halting = Raw(well.path), Raw(well.path)
    halting.sock.sendall(wire.frame(ADMIN)[:5])
    assert silent.read() is None
    assert halting.read() is None
    greeted.send(Ping(7))
    assert greeted.read() == Pong(7), "who has said hello may be silent"
    well.close()


def test_a_well_that_was_held_up_does_not_blame_who_spoke_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "HELLO_SECONDS", 0.02)
    monkeypatch.setattr(server_module.Server, "handle_unread", lambda _: time.sleep(0.1))  # in every round
    well = InThread(tmp_path)
    greeted = admin(well)
    greeted.close()
    well.close()


def test_descriptors_do_not_leak(well: InThread) -> None:
    admin(well).close()
    eventually(lambda: stats(well)["connections"] == 1)
    before = open_files()
    for n in range(60):
        peer = Raw(well.path)
        pidfd, other = os.pidfd_open(os.getpid()), os.open(os.devnull, os.O_RDONLY)
        hello = (worker(f"engine {n}"), ADMIN, Hello(99, "worker"))[n % 3]
        socket.send_fds(peer.sock, [wire.frame(hello)[:3]], [pidfd, other])
        socket.send_fds(peer.sock, [wire.frame(hello)[3:]], [other])
        os.close(pidfd)
        os.close(other)
        if n % 2:
            peer.read()
        peer.close()
    # Their sessions never came to life, so nobody needs to know when their process exits.
    eventually(lambda: stats(well)["connections"] == 1 and stats(well)["sessions"] == 0)
    eventually(lambda: open_files() <= before)


def test_only_a_hello_brings_a_descriptor(well: InThread) -> None:
    peer = Raw(well.path)
    with open(os.devnull) as nothing:
        socket.send_fds(peer.sock, [wire.frame(worker())], [nothing.fileno()])
    refused = peer.read()
    assert isinstance(refused, Refused) and refused.code == "SW-805", "what is not a pidfd does not count as one"
    peer.close()

    member = admin(well)
    read, write = os.pipe()
    socket.send_fds(member.sock, [wire.frame(Ping(1))], [write])
    os.close(write)
    assert member.read() == Pong(1)
    assert os.read(read, 1) == b"", "nobody else holds the other end"
    os.close(read)
    member.close()


def test_a_pidfd_is_told_from_other_files() -> None:
    read, write = os.pipe()
    pidfd = os.pidfd_open(os.getpid())
    assert is_pidfd(pidfd)
    assert not is_pidfd(read)
    for fd in (read, write, pidfd):
        os.close(fd)
    assert not is_pidfd(pidfd)


@contextmanager
def standing_still(well: InThread) -> Iterator[None]:
    """The well's thread looks at nothing meanwhile."""
    busy, done = threading.Event(), threading.Event()

    def occupy(_: BaseException | None) -> None:
        busy.set()
        done.wait(PATIENCE)

    well.executor.submit(lambda: None, occupy)
    assert busy.wait(PATIENCE)
    try:
        yield
    finally:
        done.set()


ORPHANED_SOCKET = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from wells import Raw, scheduler, worker
from stepwell.protocol import wire
import socket
peers = [Raw(Path(sys.argv[1])), Raw(Path(sys.argv[1]))]
for peer, hello in zip(peers, (scheduler(), worker())):
    socket.send_fds(peer.sock, [wire.frame(hello)], [os.pidfd_open(os.getpid())])
    peer.read()
if os.fork() == 0:
    os.read(0, 1)  # keeps the sockets open until the test is over
    os._exit(0)
print("joined", flush=True)
time.sleep(600)
"""


def test_an_exit_counts_although_a_child_keeps_the_socket_open(well: InThread) -> None:
    command = [sys.executable, "-c", ORPHANED_SOCKET, str(well.path), str(Path(__file__).parent)]
    engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None and engine.stdin is not None
    assert engine.stdout.readline() == "joined\n"
    assert stats(well)["sessions"] == 1
    engine.kill()
    engine.wait()
    eventually(lambda: stats(well)["sessions"] == 0)
    eventually(lambda: stats(well)["quarantined_sessions"] == 0)
    engine.stdin.close()
    engine.stdout.close()


ENGINE = ORPHANED_SOCKET.replace("if os.fork() == 0:", "if False:")


def test_an_exit_and_the_end_of_the_socket_may_come_in_one_round(well: InThread) -> None:
    command = [sys.executable, "-c", ENGINE, str(well.path), str(Path(__file__).parent)]
    engine = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    assert engine.stdout.readline() == "joined\n"
    with standing_still(well):
        engine.kill()
        engine.wait()
    eventually(lambda: stats(well)["sessions"] == 0)
    assert stats(well)["quarantined_sessions"] == 0
    engine.stdout.close()


def test_the_last_words_of_a_session_count_though_another_socket_has_ended_before(well: InThread) -> None:
    """An engine closes in order while its process goes on: what its worker has said is not held against it."""
    planner, copier = Raw(well.path), Raw(well.path)
    for peer, hello in ((planner, scheduler()), (copier, worker())):
        own = os.pidfd_open(os.getpid())
        socket.send_fds(peer.sock, [wire.frame(hello)], [own])
        os.close(own)
        assert isinstance(peer.read(), Welcome)
    for peer in (planner, copier):
        assert isinstance(peer.read(), Ready)
    shared = copier.read()
    assert isinstance(shared, SlabShared)
    copier.send(Mapped(shared.slab))
    leases: list[int] = []

    def granted() -> bool:
        planner.send(Reserve(1, 0, b"", b"d" * 32))
        answer = planner.read()
        assert isinstance(answer, Granted)
        leases[:] = answer.leases
        return leases[0] > 0

    eventually(granted)
    with standing_still(well):
        planner.close()
        copier.send(Filled(leases, []))
    eventually(lambda: stats(well)["sessions"] == 0)
    assert stats(well)["quarantined_sessions"] == 0
    copier.close()


def test_a_burst_is_answered_whole_and_in_order(well: InThread) -> None:
    peer = admin(well)
    count = 20_000
    sender = threading.Thread(target=lambda: peer.send(*(Ping(n) for n in range(count))))
    sender.start()
    assert [peer.read() for _ in range(count)] == [Pong(n) for n in range(count)]
    sender.join()
    peer.close()


def test_who_does_not_read_is_dropped(well: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "MAX_OUTPUT", 1 << 16)
    peer = admin(well)
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        while True:
            peer.send(*[StatsQuery()] * 100)
    peer.close()
    assert stats(well)["connections"] == 1


def test_another_user_is_refused(well: InThread) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    well.path.parent.chmod(0o711)
    well.path.chmod(0o666)
    read, write = os.pipe()
    folder = os.open(well.path.parent, os.O_PATH)
    child = os.fork()
    if child == 0:
        try:
            os.fchdir(folder)  # the folders above are closed to the other user
            os.setgroups([])
            os.setresuid(65534, 65534, 65534)
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(well.path.name)
                os.write(write, stranger.recv(1 << 16))
        finally:
            os._exit(0)
    os.close(write)
    os.close(folder)
    os.waitpid(child, 0)
    with open(read, "rb") as pipe:
        (refused,) = wire.Reader(wire.from_well).feed(pipe.read())
    assert isinstance(refused, Refused)
    assert refused.code == "SW-606"
    assert "65534" in refused.what
    assert stats(well)["connections"] == 1


@pytest.mark.parametrize("asks", [Stop(), Clear(["host"]), NamespacesQuery()], ids=["stop", "clear", "namespaces"])
def test_a_guest_may_look_at_the_well_and_not_change_it(
    well: InThread, monkeypatch: pytest.MonkeyPatch, asks: Message
) -> None:
    guest = os.geteuid() + 12345
    well.users[guest] = DEFAULT_TENANT
    monkeypatch.setattr(connection_module, "peer", lambda sock: (os.getpid(), guest, guest))
    peer = admin(well)
    peer.send(StatsQuery())
    assert isinstance(peer.read(), Stats)
    peer.send(asks)
    answer = peer.read()
    assert isinstance(answer, Refused) and answer.code == "SW-606"
    assert peer.read() is None
    peer.close()


@pytest.fixture
def guest(monkeypatch: pytest.MonkeyPatch) -> int:
    """Who connects from here on is this user."""
    uid = os.geteuid() + 12345
    monkeypatch.setattr(connection_module, "peer", lambda sock: (os.getpid(), uid, uid))
    return uid


def test_a_member_is_of_its_users_tenant(tmp_path: Path, guest: int) -> None:
    well = InThread(tmp_path, guests={guest + 1: "first", guest: "guests"})
    member = Recorder()
    link = dial(well.path)(scheduler(), member)
    member.next(Welcome)
    assert [session.tenant for session in well.hierarchy.registry.sessions.values()] == ["guests"]
    link.close()
    assert member.ended.wait(PATIENCE)
    well.close()


def test_a_tenant_is_told_nothing_of_the_others(tmp_path: Path, guest: int) -> None:
    well = InThread(tmp_path, guests={guest: "guests"})
    shown = {"well", "uptime_s", "tenant", "sessions", "paused_recalls", "paused_spills", "host_bytes", "pid"}
    assert stats(well).keys() == shown
    well.users[guest] = "others"
    assert stats(well)["tenant"] == "others"
    well.close()


def test_a_message_is_kept_with_its_descriptors_or_not_at_all() -> None:
    ours, theirs = socket.socketpair()
    connection = Connection(ours, Gate(ours, {}))
    before = open_files()
    assert not connection.queue(Pong(1), (0, 1 << 30))
    assert open_files() == before
    assert connection.queue(Pong(2), (0,))
    connection.close()
    assert not open_files() - before
    theirs.close()


def test_answers_that_nobody_reads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "MAX_OUTPUT", 3 * len(wire.frame(Pong(1))))
    ours, theirs = socket.socketpair()
    connection = Connection(ours, Gate(ours, {}))
    assert [connection.queue(Pong(1)) for _ in range(5)] == [True, True, True, False, False]
    assert connection.flush()
    assert connection.queue(Pong(1))
    connection.close()
    theirs.close()


def test_connections_are_bounded(well: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 1)
    first = admin(well)
    second = Raw(well.path)
    refused = second.read()
    assert isinstance(refused, Refused) and refused.code == "SW-204"
    assert second.read() is None
    second.close()
    first.send(Ping(1))
    assert first.read() == Pong(1)
    first.close()
    eventually(lambda: isinstance(_hello(well), Welcome))


def _hello(well: InThread) -> object:
    peer = Raw(well.path)
    try:
        peer.send(ADMIN)
        return peer.read()
    except (BrokenPipeError, ConnectionResetError):
        return None
    finally:
        peer.close()


def test_watched_processes_are_bounded(well: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits, "MAX_WATCHED", 1)
    first, second = Recorder(), Recorder()
    link = dial(well.path)(worker("one"), first)
    first.next(Welcome)
    dial(well.path)(worker("two"), second)
    assert second.next(Refused)[0].code == "SW-204"
    link.close()


@contextmanager
def no_descriptors() -> Iterator[socket.socket]:
    """A socket, and no more descriptors in this process, meanwhile."""
    waiting, limits, fillers = socket.socket(socket.AF_UNIX), resource.getrlimit(resource.RLIMIT_NOFILE), []
    waiting.settimeout(PATIENCE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (waiting.fileno() + 1, limits[1]))
    try:
        with pytest.raises(OSError):
            while True:
                fillers.append(os.dup(0))
        yield waiting
    finally:
        for fd in fillers:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("unwatched", [0, 2])
def test_running_out_of_descriptors_is_survived(
    well: InThread, monkeypatch: pytest.MonkeyPatch, unwatched: int
) -> None:
    """Also where the system then does not watch the well's own socket at once."""
    eventually(lambda: not any(thread.name == "stepwell-link" for thread in threading.enumerate()))  # they close some
    monkeypatch.setattr(listeners, "_DEAF_SECONDS", 0.02)
    first = admin(well)
    register, refused = well.loop._selector.register, []

    def refuse(*arguments: object) -> object:
        if len(refused) < unwatched:
            refused.append(arguments)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return register(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(well.loop._selector, "register", refuse)
    with no_descriptors() as waiting:
        waiting.connect(str(well.path))
        first.send(Ping(1))
        assert first.read() == Pong(1)
        eventually(lambda: len(refused) == unwatched)  # before there are descriptors: those are for its socket
    waiting.sendall(wire.frame(ADMIN))
    assert waiting.recv(1 << 16)
    waiting.close()
    first.close()


def test_a_descriptor_that_comes_back_is_for_who_waits_at_once(well: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after another moment: clients that gave up while they waited would be let in and out one at a moment."""
    eventually(lambda: not any(thread.name == "stepwell-link" for thread in threading.enumerate()))  # they close some
    monkeypatch.setattr(listeners, "_DEAF_SECONDS", 10 * PATIENCE)
    first = admin(well)
    with no_descriptors() as waiting:
        waiting.connect(str(well.path))
        eventually(lambda: well.loop._server._listeners.deaf_until is not None)
        first.close()
        waiting.sendall(wire.frame(ADMIN))
        assert waiting.recv(1 << 16)
    waiting.close()


def test_a_system_that_watches_no_more_is_survived(well: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where epoll's max_user_watches is used up: who cannot be watched is sent away, all others are served."""
    first, selector = admin(well), well.loop._selector
    register = selector.register
    refuse_all = True

    def refuse(what: object, *rest: object) -> object:
        if refuse_all or isinstance(what, int):  # of these only pidfds are watched by their number
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return register(what, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(selector, "register", refuse)
    assert _hello(well) is None
    refuse_all = False
    member = Recorder()
    dial(well.path)(worker(), member)
    assert member.ended.wait(PATIENCE) and member.messages.empty(), "nobody is welcome whose exit is not seen"
    first.send(Ping(1))
    assert first.read() == Pong(1)
    monkeypatch.undo()
    again = Recorder()
    link = dial(well.path)(worker(), again)
    again.next(Welcome)
    link.close()
    first.close()


def test_stop_is_answered_before_the_end(well: InThread) -> None:
    peer, other = admin(well), admin(well)
    peer.send(Stop())
    assert isinstance(peer.read(), Stopping)
    assert peer.read() is None
    assert other.read() is None
    well.thread.join(PATIENCE)
    assert well.why == "it was asked to"


def test_lingering_ends_only_without_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "GRACE_SECONDS", 60.0)
    well = InThread(tmp_path, Linger(blocks=60.0, empty=0.0))
    member = Recorder()
    link = dial(well.path)(worker(), member)
    member.next(Welcome)
    assert stats(well)["sessions"] == 1
    assert well.thread.is_alive(), "a session is connected"
    link.close()
    well.thread.join(PATIENCE)
    assert well.why == "no engine has used it for a while"
    well.close()


def test_a_wait_ends_whatever_number_its_descriptor_has() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    wakeup = Wakeup()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], min(limits[1], 2048)), limits[1]))
    try:  # `select` knows only 1,024, and a well of many engines and segments has more
        low, wakeup._read = wakeup._read, socket.socket(fileno=fcntl.fcntl(wakeup.fileno(), fcntl.F_DUPFD, 1500))
        low.close()
        wakeup.wait(0.0)
        woken: list[float] = []
        threading.Timer(0.05, lambda: (woken.append(time.monotonic()), wakeup.wake())).start()
        began = time.monotonic()
        wakeup.wait(PATIENCE)
        assert woken and time.monotonic() - began < PATIENCE
    finally:
        wakeup.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_jobs_end_on_the_owners_thread_with_what_they_raised() -> None:
    wakeup = Wakeup()
    executor = ThreadExecutor(wakeup)
    ended: list[tuple[int, BaseException | None]] = []
    threads: list[int] = []

    def fail() -> None:
        threads.append(threading.get_ident())
        raise OSError("no")

    executor.submit(fail, lambda error: ended.append((threading.get_ident(), error)))
    clock = MonotonicClock()
    eventually(lambda: executor.complete(clock, clock.now()) or bool(ended))
    thread, error = ended[0]
    assert thread == threading.get_ident() != threads[0]
    assert isinstance(error, OSError)
    assert executor.close(PATIENCE)
    wakeup.close()


def test_threads_that_write_yield_to_those_that_read() -> None:
    wakeup = Wakeup()
    readers, others = Storage().add_threads(wakeup, 1)
    found: dict[ThreadExecutor, int] = {}
    for executor in (readers, others):
        executor.submit(lambda executor=executor: found.setdefault(executor, thread_priority()), lambda _: None)  # type: ignore[misc]
    eventually(lambda: len(found) == 2)
    assert found[readers] == thread_priority() < found[others], "a higher number yields"
    assert all(executor.close(PATIENCE) for executor in found)
    wakeup.close()


def thread_priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_a_system_without_threads_says_so_as_the_system_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    wakeup = Wakeup()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OSError, match="new thread") as caught:
        ThreadExecutor(wakeup)
    assert caught.value.errno == errno.EAGAIN
    wakeup.close()


def test_a_stuck_job_is_left_behind() -> None:
    wakeup = Wakeup()
    executor = ThreadExecutor(wakeup, threads=1)
    started, release = threading.Event(), threading.Event()
    later: list[int] = []

    def hang() -> None:
        started.set()
        release.wait(PATIENCE)

    executor.submit(hang, lambda _: None)
    executor.submit(lambda: later.append(1), lambda _: None)
    assert started.wait(PATIENCE)
    assert not executor.close(0.01)
    release.set()
    assert executor.close(PATIENCE)
    assert not later, "nothing is begun after the end"
    wakeup.close()


def test_the_wells_settings_rule_and_wishes_are_answered() -> None:
    say = judge(Settings(host=64 * MIB))
    assert say({"host": "64MiB", "linger": "10m"}) == []
    (warning,) = say({"host": "1GiB"})
    assert "SW-111" in warning and "host" in warning
    with pytest.raises(ConfigError) as caught:
        say({"hots": "1GiB"})
    assert caught.value.code == "SW-101"


@pytest.mark.parametrize("wish", ["allow_uids", "tenants.a.uids", "tenants.a.socket", "tenants"])
def test_no_engine_learns_or_decides_who_else_is_served(wish: str) -> None:
    tenants = {"a": {"uids": "1001"}}
    say = judge(Settings(host=64 * MIB, socket="/s", allow_uids="7", tenants=tenants))  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        say({wish: "1"})
    assert caught.value.code == "SW-102" and "1001" not in str(caught.value)


def test_a_wish_is_granted_as_it_is_written_and_as_it_is_in_fact() -> None:
    say = judge(Settings(host="25%", disk="/a:1GiB,/b"), 64 * MIB)  # type: ignore[arg-type]
    assert say({"host": "25%", "disk": "/a:1GiB,/b:50%"}) == say({"host": "64MiB"}) == []
    (warning,) = say({"host": "26%"})
    assert "host = 64MiB, not 26% as asked for" in warning
    (warning,) = say({"disk": "/a:2GiB"})
    assert "disk = /a:1GiB,/b:50%, not /a:2GiB as asked for" in warning


def test_garbage_collection_is_given_back(tmp_path: Path) -> None:
    well = InThread(tmp_path)
    admin(well).close()
    assert not gc.isenabled()
    well.close()
    assert gc.isenabled()
