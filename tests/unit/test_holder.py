"""One home has one well, whatever the environments of those who look for it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from wells import eventually, home_apart

from stepwell.cli.options import socket_of
from stepwell.client import asking, control, holder, start
from stepwell.client.holder import HOLDER_NAME
from stepwell.config import Settings, document
from stepwell.errors import AccessDenied, BackendDown
from stepwell.io.paths import Rendezvous
from stepwell.serve import process
from stepwell.serve.home.holding import holding

WISHES = {"host": "64MiB", "linger_empty": "60s"}


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with home_apart(monkeypatch) as home:
        home.mkdir(mode=0o700)
        (home.parent / "login").mkdir(mode=0o700)
        start._tell.cache_clear()
        yield home
        if (well := holder.holder(home)) is not None and well.pid not in (0, os.getpid()):
            os.kill(well.pid, signal.SIGKILL)
            eventually(lambda: holder.holder(home) is None)


def log_in(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """From here on as in a login session; until then it was as in a service."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home.parent / "login"))


def test_who_has_another_runtime_directory_joins_the_same_well(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert start.find_or_start(home, WISHES).started
    pid, place = control.pid(home), start.rendezvous(home)
    assert not caplog.records
    log_in(monkeypatch, home)
    assert start.find_or_start(home, WISHES) == start.FoundWell(place.socket, started=False)
    assert start.find(home) == place.socket
    assert control.pid(home) == pid
    assert [r.getMessage().count(str(place.socket)) for r in caplog.records] == [1], "once, though found three times"
    with pytest.raises(BackendDown, match="SW-501"):
        process.run(home, Settings(host=64 << 20))
    assert (home / HOLDER_NAME).exists()
    control.stop(home)
    assert control.pid(home) is None
    assert not (home / HOLDER_NAME).exists()
    assert start.rendezvous(home).lock.parent == home.parent / "login" / "stepwell", "its own again"


def test_a_well_holds_its_home_for_as_long_as_it_serves(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[holder.Holder | None] = []

    def serve(*_: object) -> str:
        held.append(holder.holder(home))
        return "it was told to"

    monkeypatch.setattr(process, "_serve", serve)
    monkeypatch.setattr(process.dumps, "forbid", lambda: None)
    assert process.run(home, Settings(host=64 << 20)) == "it was told to"
    assert held == [holder.Holder(start.rendezvous(home), os.getpid())]
    assert holder.holder(home) is None and not (home / HOLDER_NAME).exists()


def test_what_a_killed_well_has_left_keeps_nobody_from_starting(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what is left after a restart of the host, when the process number is another's."""
    start.find_or_start(home, WISHES)
    well = holder.holder(home)
    assert well is not None
    os.kill(well.pid, signal.SIGKILL)
    eventually(lambda: holder.holder(home) is None)
    assert (home / HOLDER_NAME).exists()
    log_in(monkeypatch, home)
    found = start.find_or_start(home, WISHES)
    assert found.started and found.socket.parent == home.parent / "login" / "stepwell"


def test_a_well_that_cannot_be_reached_from_here_is_named_and_no_second_one_started(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in another container: its runtime directory is not here, or is another one of the same name."""
    begun: list[object] = []
    monkeypatch.setattr(start, "_start", lambda *arguments: begun.append(arguments))
    mine = start.rendezvous(home)
    elsewhere = Rendezvous(Path("/nowhere/x.sock"), Path("/nowhere/x.lock"))
    for place in (elsewhere, mine):
        with holding(home, place):
            for look in (lambda: start.find_or_start(home, WISHES), lambda: process.run(home, Settings(host=64 << 20))):
                with pytest.raises(BackendDown) as caught:
                    look()
                assert caught.value.code == "SW-501" and "XDG_RUNTIME_DIR" in caught.value.fix
                assert str(os.getpid()) in caught.value.why and str(place.socket) in caught.value.why
    assert not begun
    start.find_or_start(home, WISHES)
    assert begun


def test_a_lock_without_a_place_is_waited_for_where_its_well_starts(home: Path) -> None:
    path = home / HOLDER_NAME
    for content in (b"", b"{", b'{"pid": 1}', b"\xff" * 9000):
        path.write_bytes(content)
        with open(path, "rb") as file:
            assert holder.holder(home) is None
            fcntl.flock(file, fcntl.LOCK_EX)
            assert holder.holder(home) == holder.Holder(None, 0)
            assert start.rendezvous(home) == Rendezvous.of(home, start.runtime_dir(os.environ))


def test_who_looks_keeps_no_well_from_starting(home: Path) -> None:
    """Whether it is locked is asked with a lock that others may share, for a moment."""
    path = home / HOLDER_NAME
    path.touch()
    with open(path, "rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        done = iter([False, False, True])

        def pause(seconds: float) -> None:
            if next(done):
                fcntl.flock(looking, fcntl.LOCK_UN)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("stepwell.serve.home.holding.time.sleep", pause)
            with holding(home, start.rendezvous(home)):
                assert holder.holder(home) is not None


def test_the_file_of_another_user_says_nothing(home: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    with holding(home, Rendezvous(Path("/nowhere/x.sock"), Path("/nowhere/x.lock"))):
        os.chown(home / HOLDER_NAME, 65534, 65534)
        assert holder.holder(home) is None


def test_on_a_filesystem_without_locks_nothing_is_held_and_no_well_starts(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / HOLDER_NAME).touch()
    place = start.rendezvous(home)
    for number in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):

        def refuse(fd: int, operation: int, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "flock", refuse)
            assert holder.holder(home) is None
            with pytest.raises(AccessDenied) as caught, holding(home, place):
                pass
            assert caught.value.code == "SW-604" and os.strerror(number) in caught.value.why


def waiting() -> list[threading.Thread]:
    """Threads that home keeps."""
    return [thread for thread in threading.enumerate() if thread.name == "stepwell-home"]


def test_who_asks_a_home_that_hangs_is_told_so_and_one_thread_waits(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By settings whose read does not come back until it is let."""
    answers, content = threading.Event(), document._content
    monkeypatch.setattr(document, "_content", lambda path: (answers.wait(), content(path))[1])
    monkeypatch.setattr(asking, "HOME_SECONDS", 0.05)
    looks = (
        lambda: socket_of(None, home),
        lambda: start.find(home),
        lambda: start.find_or_start(home, WISHES),
        lambda: control.stats(home),
        lambda: control.stop(home),
    )
    try:
        for look in looks:
            with pytest.raises(BackendDown) as caught:
                look()
            assert caught.value.code == "SW-514" and "--socket PATH" in caught.value.fix
            assert len(waiting()) == 1
        assert socket_of(Path("/there"), home) == Path("/there"), "whoever names it does not need home"
    finally:
        answers.set()
    eventually(lambda: not waiting())
    assert socket_of(None, home) is None, "it answers again"


def test_where_a_well_listens_home_is_not_asked_who_holds_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hang, and a well that runs is found all the same."""
    start.find_or_start(home, WISHES)
    place, asked = start.rendezvous(home), []
    with monkeypatch.context() as patch:
        patch.setattr(start, "holder", asked.append)
        assert start.find(home) == place.socket
        assert start.find_or_start(home, WISHES) == start.FoundWell(place.socket, started=False)
        assert control.ping(home) > 0 and control.pid(home)
    assert not asked
    control.stop(home)


def test_a_thread_that_asks_home_raises_what_it_finds_and_is_not_inherited(home: Path) -> None:
    def no() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asking.within(home, no)
    with asking._turn:
        child = os.fork()
        if child == 0:  # it has no such thread, and its turn
            os._exit(asking.within(home, lambda: 7))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


INSIDE = """
import os, sys
from pathlib import Path
from stepwell.client import start
from stepwell.errors import BackendDown
try:
    start.find_or_start(Path(sys.argv[1]), {"host": "64MiB"})
except BackendDown as error:
    print(error.code, "another container" in error.why)
"""


def test_a_container_with_the_same_home_and_another_tmp_starts_no_second_well(home: Path) -> None:
    """By a mount namespace, in which /tmp has its own files under the same names."""
    start.find_or_start(home, WISHES)
    runtime = start.rendezvous(home).lock.parent
    script = f'mount -t tmpfs -o mode=700 none {runtime} && exec "$@"'
    unshare = shutil.which("unshare")
    wrap = [unshare or "unshare", *([] if os.geteuid() == 0 else ["-r"]), "-m", "sh", "-c", script, "sh"]
    if unshare is None or subprocess.run([*wrap, "true"], capture_output=True).returncode != 0:
        pytest.skip("mounts cannot be made here")
    command = [*wrap, sys.executable, "-c", INSIDE, str(home)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["SW-501", "True"]
