"""A member joins again whatever its attempts or its threads raise: errors at every call, and at every statement."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
from wells import eventually, home_apart, open_files, worker

from stepwell.block.layout import SlabLayout
from stepwell.client import membership as joining
from stepwell.client import slabs, start
from stepwell.client import socket as link
from stepwell.client import worker as working
from stepwell.client.identity import WorkerIdentity
from stepwell.client.membership import Membership
from stepwell.errors import AccessDenied, BackendDown, StepwellError
from stepwell.io.memory import SharedMemory
from stepwell.protocol import messages as m
from stepwell.protocol import wire

LAYOUT = SlabLayout(4096, 2)
SHARED = m.SlabShared(1, LAYOUT.nbytes, LAYOUT.offset, LAYOUT.stride, LAYOUT.slots)
TRACED = (joining, link, slabs, working)


def full() -> OSError:
    return OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class Quiet:
    def received(self, message: m.FromWell, fds: Sequence[int]) -> None:
        for fd in fds:
            os.close(fd)

    def lost(self) -> None: ...


class Answering:
    """A well that welcomes each member into a session of its own, with one slab, and can end all their links."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._slab = SharedMemory(LAYOUT.nbytes)
        self._lock = threading.Lock()
        self._links: list[socket.socket] = []
        self.sessions = 0
        self.mapped = 0  # the latest session whose member has the slab
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                with self._lock:
                    self._links.append(sock)
                    self.sessions += 1
                    thread = threading.Thread(target=self._talk, args=(sock, self.sessions), daemon=True)
                    self._threads.append(thread)
                thread.start()

    def _talk(self, sock: socket.socket, session: int) -> None:
        reader = wire.Reader(wire.from_engine)
        with sock, contextlib.suppress(OSError):
            while data := sock.recv(1 << 16):
                for message in reader.feed(data):
                    if isinstance(message, m.Hello):
                        sock.sendall(wire.frame(m.Welcome(session, m.PROTOCOL, "test", 0)))
                        socket.send_fds(sock, [wire.frame(SHARED)], [self._slab.fd])
                        sock.sendall(wire.frame(m.Ready(session)))
                    elif isinstance(message, m.Mapped):
                        with self._lock:  # the thread of an earlier session may come to its last message later
                            self.mapped = max(self.mapped, session)

    def sever(self) -> None:
        with self._lock:
            links, self._links = self._links, []
        for sock in links:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()  # who came last is known now
        self.sever()
        for thread in self._threads:
            thread.join()
        self._slab.close()


@pytest.fixture
def well(tmp_path: Path) -> Iterator[Answering]:
    answering = Answering(tmp_path / "well.sock")
    yield answering
    answering.close()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_WAIT", "LONGEST_WAIT", "SILENT_WAIT"):
        monkeypatch.setattr(joining, name, 0.002)


# --- every call of an attempt -----------------------------------------------------------------------------------------


SYSTEM = {"posix", "socket", "_socket", "select", "fcntl", "_thread", "_io"}


class AtCall:
    """Raises at the n-th call into the system that client code makes on this thread. What gives a resource back is left
    alone: it does not fail, and would seem to leak."""

    def __init__(self, n: int) -> None:
        self.left = n
        self.raised = ""

    def __call__(self, frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call" or "/stepwell/client/" not in frame.f_code.co_filename:
            return
        modules = {function.__module__, type(function.__self__).__module__}
        if not modules & SYSTEM or function.__name__ in ("close", "__exit__"):
            return
        self.left -= 1
        if self.left == 0:
            self.raised = f"{function.__qualname__} in {frame.f_code.co_name}"
            raise full()


def attempts(member: Callable[[], Membership]) -> Iterator[tuple[str, Membership]]:
    """A member after an attempt at whose n-th call an error was raised, for each n that there is."""
    n = 0
    while True:
        n += 1
        one, fault = member(), AtCall(n)
        sys.setprofile(fault)
        try:
            one.attempt()
        finally:
            sys.setprofile(None)
        if not fault.raised:
            one.close()
            return
        yield fault.raised, one


def test_an_attempt_that_fails_at_any_call_leaves_nothing_and_the_next_one_joins(well: Answering) -> None:
    told: list[StepwellError] = []
    eventually(lambda: well.sessions == 0)
    before = open_files()
    seen = set()
    for raised, member in attempts(lambda: Membership(worker, lambda: link.dial(well.path), Quiet(), told.append)):
        seen.add(raised)
        if member.outbox is None:
            assert told and told[-1].code[:4] != "SW-6", (raised, told[-1])
            assert member.attempt(), raised
        member.close()
    assert {"pidfd_open in _own_pidfd", "eventfd in __init__", "socket.connect in connect"} <= seen, sorted(seen)
    eventually(lambda: len(open_files()) <= len(before))


def test_looking_for_a_well_leaves_nothing_whatever_call_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has to be started: the starter is replaced by one that ends at once."""
    ends = subprocess.Popen
    monkeypatch.setattr(start.subprocess, "Popen", lambda command, **rest: ends(["/bin/true"], **rest))
    told: list[StepwellError] = []
    with home_apart(monkeypatch) as home:
        start.rendezvous(home)
        before, seen = open_files(), set()

        def find() -> link.Dial:
            return link.dial(start.find_or_start(home, {}).socket)

        for raised, member in attempts(lambda: Membership(worker, find, Quiet(), told.append)):
            seen.add(raised)
            assert member.outbox is None
            assert open_files() == before, raised
        assert {"pipe in _start", "open in _opened"} <= seen, sorted(seen)


def test_a_lack_of_descriptors_is_not_taken_for_a_wrong_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person must act on that, so it is tried again after a minute only; this passes by itself."""
    open_ = os.open

    def refuse(number: int, path: str, *rest: Any, **named: Any) -> int:
        if str(path).endswith(".lock"):
            raise OSError(number, os.strerror(number))
        return open_(path, *rest, **named)

    with home_apart(monkeypatch) as home:
        place = start.rendezvous(home).lock
        monkeypatch.setattr(os, "open", partial(refuse, errno.EMFILE))
        with pytest.raises(BackendDown, match="SW-510"), start.lock(place):
            pass
        monkeypatch.setattr(os, "open", partial(refuse, errno.EACCES))
        with pytest.raises(AccessDenied, match="SW-604"), start.lock(place):
            pass


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "error", [full(), OSError(errno.ENOMEM, "memory"), MemoryError(), RuntimeError("thread"), KeyError()]
)
def test_an_attempt_that_raises_is_followed_by_another(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    told: list[str] = []
    waits: list[float] = []

    def find() -> link.Dial:
        raise error

    member = Membership(worker, find, Quiet(), lambda error: told.append(error.code))

    def wait(seconds: float | None = None) -> bool:
        waits.append(seconds or 0.0)
        if len(waits) == 8:
            member.close()
        return False

    monkeypatch.setattr(member._closed, "wait", wait)
    member._run()
    assert member.outbox is None
    assert told == ["SW-510"]
    assert waits == sorted(waits) and waits[-1] == joining.LONGEST_WAIT, waits


def test_a_link_whose_receiver_raises_is_lost_all_the_same() -> None:
    class Raising(Quiet):
        def lost(self) -> None:
            raise full()

    member = Membership(lambda: None, lambda: pytest.fail("nobody asked"), Raising(), lambda error: None)
    member._lost.clear()
    with pytest.raises(OSError, match="open files"):
        member.lost()
    assert member._lost.is_set(), "the joining thread waits for this"


# --- every statement of its threads -----------------------------------------------------------------------------------

FILES = {module.__file__ for module in TRACED}
_CANNOT_RAISE = re.compile(
    r"\s*(try:|else:|finally:|except |return$|(if|while) (not )?\w+:|while not self._closed|over = False|with suppress"
    r"|self\._lost\.set|self\._outbox = None|self\._(receiver|membership)\.lost)"  # the word that a link is lost, alone
)


class Tracer:
    """Raises once, before a statement, in a thread of ours; without one it notes what there is."""

    def __init__(self, at: tuple[str, int] | None = None) -> None:
        self.at = at
        self.seen: dict[tuple[str, int], None] = {}
        self.fired = threading.Event()
        self.over = False

    def called(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self.line if frame.f_code.co_filename in FILES else None

    def line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            here = frame.f_code.co_filename, frame.f_lineno
            if self.at is None:
                self.seen[here] = None
            elif here == self.at and not (self.over or self.fired.is_set()):
                self.fired.set()
                raise full()
        return self.line


def lives(well: Answering, tracer: Tracer, told: list[StepwellError]) -> None:
    """A worker joins and loses its link until the tracer has raised (thrice, if it is not to). Then it must have its
    slab in a new session."""
    before = well.sessions
    threading.settrace(tracer.called)
    try:
        identity = WorkerIdentity("e", 0, 1, 4096, bytes(32))
        client = working.WorkerClient(identity, lambda: link.dial(well.path), trouble=told.append)
        for last in (False, False, True):
            eventually(lambda before=before: tracer.fired.is_set() or well.mapped > before)
            tracer.over = last or tracer.fired.is_set()
            before = well.sessions
            well.sever()
            if tracer.over:
                break
        eventually(lambda: well.mapped > before)
        client.close()
    finally:
        threading.settrace(None)  # type: ignore[arg-type]


def statements(well: Answering, module: ModuleType) -> list[tuple[str, int]]:
    tracer = Tracer()
    lives(well, tracer, [])
    source = Path(str(module.__file__)).read_text().splitlines()
    ours = [(file, line) for file, line in tracer.seen if file == module.__file__]
    return [(file, line) for file, line in ours if not _CANNOT_RAISE.match(source[line - 1])]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("module", TRACED, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_worker_joins_again_whichever_statement_of_its_threads_raises(
    well: Answering, at_once: None, module: ModuleType
) -> None:
    found = statements(well, module)
    assert len(found) > 10
    for at in found:
        lives(well, Tracer(at), [])


# --- a real bound -----------------------------------------------------------------------------------------------------

STARVED = """
import os, resource, sys
from pathlib import Path
from wells import PATIENCE, Recorder, worker
from stepwell.client.identity import WorkerIdentity
from stepwell.client.membership import Membership
from stepwell.client.socket import dial
from stepwell.protocol.messages import Ready

class Member(Recorder):
    def lost(self):
        give_back()

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass

def give_back():
    global room
    os.close(taken.pop())
    room += 1
    membership._told = ""

room, member = 0, Member()
membership = Membership(worker, lambda: dial(Path(sys.argv[1])), member, lambda error: give_back())
membership.begin(threaded=True)
said = member.messages.get(timeout=PATIENCE)[0]
while not isinstance(said, Ready):
    said = member.messages.get(timeout=PATIENCE)[0]
print(room > 0)
"""


def test_a_member_without_descriptors_joins_as_soon_as_there_are_some(well: Answering) -> None:
    """One more is given back at each failure, so that every call of an attempt is the one that fails."""
    done = subprocess.run(
        [sys.executable, "-c", STARVED, str(well.path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["True"], done.stderr
