"""Wells as real processes: found, started once, replaced, stopped, and independent of whoever started them."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from wells import PATIENCE, Recorder, eventually, home_apart, scheduler

from stepwell.client import control, start
from stepwell.client.finder import finder
from stepwell.client.holder import Holder
from stepwell.client.socket import SocketLink, dial
from stepwell.config import Settings
from stepwell.errors import AccessDenied, BackendDown, ConfigError
from stepwell.protocol.messages import Ask, Welcome
from stepwell.serve.process import run

WISHES = {"host": "64MiB", "linger_empty": "60s"}

STARTER = """
import json, sys, time
from pathlib import Path
from stepwell.client.finder import finder
from stepwell.client import control, start
home = Path(sys.argv[1])
found = start.find_or_start(home, {"host": "64MiB", "linger_empty": "60s"})
heavy = sorted({"pydantic", "yaml", "cryptography", "xxhash"} & set(sys.modules))
print(json.dumps([found.started, control.pid(home), heavy]), flush=True)
time.sleep(600)
"""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home and a runtime directory of their own; whatever well is left there is ended."""
    with home_apart(monkeypatch) as home:
        yield home
        if (os.environ["TMPDIR"] == str(home.parent)) and (pid := control.pid(home)):
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    """Not a zombie either: an orphan's body is removed by init whenever it likes."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def well_of(home: Path) -> int:
    pid = control.pid(home)
    assert pid
    return pid


def descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents.setdefault(parent, []).append(int(name))
    found, waiting = [], [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def test_two_start_at_once_and_the_well_survives_both_with_all_their_descendants(home: Path) -> None:
    command = [sys.executable, "-c", STARTER, str(home)]
    starters = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = []
    for starter in starters:
        assert starter.stdout is not None
        answers.append(json.loads(starter.stdout.readline()))
    assert sorted(started for started, _, _ in answers) == [False, True]
    assert answers[0][1] == answers[1][1] == control.pid(home), "one well, both joined"
    assert [heavy for _, _, heavy in answers] == [[], []], "the engine side stays light"
    for starter in starters:
        for pid in [*descendants(starter.pid), starter.pid]:
            os.kill(pid, signal.SIGKILL)
        starter.wait()
        assert starter.stdout is not None
        starter.stdout.close()
    assert control.ping(home) > 0

    values = control.stats(home)
    assert (values["host_bytes"], values["sessions"]) == (64 << 20, 0)
    place = start.rendezvous(home)
    assert stat.S_IMODE(place.socket.stat().st_mode) == 0o600
    control.stop(home)
    assert control.pid(home) is None
    assert {file.name for file in home.iterdir()} == {"keyring", "stepwell.log", "README.txt"}
    assert [file.name for file in place.lock.parent.iterdir()] == [place.lock.name]
    assert stat.S_IMODE(place.lock.stat().st_mode) == 0o600
    assert "it was asked to" in (home / "stepwell.log").read_text()


def test_a_well_that_we_started_stays_ours_to_start_when_it_was_only_found_meanwhile(home: Path) -> None:
    reach = finder(home, None, WISHES)
    reach()
    reach()  # joining the well that we had started had failed
    well = well_of(home)
    os.kill(well, signal.SIGKILL)
    eventually(lambda: control.pid(home) is None)
    reach()
    assert well_of(home) != well


def test_a_well_that_we_only_joined_is_not_ours_to_start(home: Path) -> None:
    assert start.find_or_start(home, WISHES).started
    reach = finder(home, None, WISHES)
    reach()
    os.kill(well_of(home), signal.SIGKILL)
    eventually(lambda: control.pid(home) is None)
    with pytest.raises(BackendDown, match="SW-505"):
        reach()


def test_a_killed_well_may_let_go_of_its_home_last(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([Holder(None, 1), Holder(None, 1)])
    monkeypatch.setattr(start, "holder_of", lambda home: next(seen, None))
    assert start.find_or_start(home, WISHES).started
    assert next(seen, None) is None


def test_a_killed_well_leaves_a_socket_that_the_next_one_replaces(home: Path) -> None:
    assert start.find_or_start(home, WISHES).started
    place, killed = start.rendezvous(home), well_of(home)
    assert start.find(home) == place.socket
    assert not start.find_or_start(home, WISHES).started
    receiver = Recorder()
    dial(place.socket)(scheduler(), receiver)
    receiver.next(Welcome)
    os.kill(killed, signal.SIGKILL)
    assert receiver.ended.wait(PATIENCE)
    eventually(lambda: control.pid(home) is None)  # its descriptors are closed one by one
    assert {file.name for file in place.lock.parent.iterdir()} == {place.lock.name, place.socket.name}
    for ask in (start.find, control.ping, control.stats, control.stop):
        with pytest.raises(BackendDown) as caught:
            ask(home)
        assert caught.value.code == "SW-505"
    assert start.find_or_start(home, WISHES).started
    well = well_of(home)
    assert well != killed

    with pytest.raises(BackendDown) as caught:
        run(home, Settings())
    assert caught.value.code == "SW-501"
    assert str(well) in caught.value.why

    os.kill(well, signal.SIGTERM)
    eventually(lambda: not is_running(well))
    assert not place.socket.exists()
    assert "SIGTERM" in (home / "stepwell.log").read_text()


def test_a_stopped_well_holds_nobody_up(home: Path) -> None:
    path = start.find_or_start(home, WISHES).socket
    well = well_of(home)
    os.kill(well, signal.SIGSTOP)
    try:
        receiver = Recorder()
        link = dial(path)(scheduler(), receiver)
        assert isinstance(link, SocketLink)
        for n in range(1000):
            link.post(Ask(n, 0, n, bytes(3200)))
        with pytest.raises(BackendDown) as caught:
            control.ping(home, seconds=0.05)
        assert caught.value.code == "SW-503"
        assert f"kill -9 {well}" in caught.value.fix
        assert receiver.ended.wait(PATIENCE)
        assert link.reason is not None and link.reason.code == "SW-503"
        assert not start.find_or_start(home, WISHES).started, "it is there, and nobody starts another one"
    finally:
        os.kill(well, signal.SIGCONT)
    assert control.ping(home, PATIENCE) > 0
    receiver = Recorder()
    dial(path)(scheduler(), receiver)
    receiver.next(Welcome)
    control.stop(home, PATIENCE)


def test_what_keeps_a_well_from_starting_is_said_by_the_well(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as caught:
        start.find_or_start(home, {"hots": "1GiB"})
    assert caught.value.code == "SW-101"
    assert "did you mean host" in caught.value.what
    home.chmod(0o777)
    with pytest.raises(AccessDenied) as denied:
        start.find_or_start(home, WISHES)
    assert denied.value.code == "SW-602"
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BackendDown) as down:
        start.find_or_start(home, WISHES)
    assert down.value.code == "SW-502"
    with start.lock(start.rendezvous(home).lock) as taken:
        assert taken is not None, "no failed start keeps the lock"


def test_what_the_system_refuses_a_starting_well_is_said_in_words(home: Path) -> None:
    home.mkdir(mode=0o700)
    (home / "stepwell.log").mkdir()
    with pytest.raises(BackendDown) as caught:
        start.find_or_start(home, WISHES)
    assert caught.value.code == "SW-502"
    assert "Is a directory" in caught.value.why and "memory, threads and open files" in caught.value.fix
    assert control.pid(home) is None
    (home / "stepwell.log").rmdir()
    assert start.find_or_start(home, WISHES).started
    control.stop(home, PATIENCE)


def test_a_crash_before_the_well_serves_reaches_the_starter(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = home.parent / "broken" / "msgspec"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('a broken installation')")
    monkeypatch.setenv("PYTHONPATH", str(broken.parent))
    with pytest.raises(BackendDown) as caught:
        start.find_or_start(home, WISHES)
    assert caught.value.code == "SW-502"
    assert "a broken installation" in caught.value.why


def test_a_starter_that_is_killed_meanwhile_does_not_take_the_well_with_it(home: Path) -> None:
    read, write = os.pipe()
    with start.lock(start.rendezvous(home).lock) as taken:
        assert taken is not None
        command = [sys.executable, "-m", "stepwell.serve.detached", str(home), str(taken)]
        starting = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=write, pass_fds=(taken,))
        os.close(read)
        os.close(write)
        starting.communicate(json.dumps(WISHES).encode(), timeout=PATIENCE)
    eventually(lambda: control.pid(home) is not None)
    assert control.ping(home, PATIENCE) > 0
    control.stop(home, PATIENCE)


def test_a_well_that_hangs_while_it_starts_is_not_waited_for(home: Path) -> None:
    with start.lock(start.rendezvous(home).lock) as taken:
        assert taken is not None
        with pytest.raises(BackendDown) as caught:
            start.find_or_start(home, WISHES, seconds=0.05)
    assert caught.value.code == "SW-502"


def is_free(path: Path) -> bool:
    with start.lock(path) as taken:
        return taken is not None


def test_a_forked_child_does_not_keep_the_lock(home: Path) -> None:
    path = start.rendezvous(home).lock
    read, write = os.pipe()
    with start.lock(path) as taken:
        assert taken is not None
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        with start.lock(path) as second:
            assert second is None
    eventually(lambda: is_free(path))
    os.close(write)
    os.close(read)
    os.waitpid(child, 0)


def test_a_lock_that_its_holder_deleted_meanwhile_is_not_taken_for_one(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock = start.rendezvous(home).lock, fcntl.flock
    deleted = []

    def late(fd: int, operation: int) -> None:
        """Between our opening the file and our lock somebody else held it, and deleted it."""
        if not deleted:
            deleted.append(os.fstat(fd).st_ino)
            path.unlink()
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with start.lock(path) as taken:
        assert taken is not None and os.path.samestat(os.fstat(taken), path.stat())
        with start.lock(path) as second:
            assert second is None
    assert not start._held, "what was opened in vain is closed"


def test_a_runtime_directory_of_another_user_is_not_used(home: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    directory = start.rendezvous(home).lock.parent
    os.chown(directory, 65534, 65534)
    try:
        for ask in (start.find, control.ping):
            with pytest.raises(AccessDenied) as caught:
                ask(home)
            assert caught.value.code == "SW-604"
    finally:
        os.chown(directory, 0, 0)


def test_an_engines_tuning_does_not_reach_the_well(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("a well's environment is closed to everybody but root")
    for name in ("OMP_NUM_THREADS", "KMP_AFFINITY", "VLLM_TARGET_DEVICE", "LD_PRELOAD"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    try:
        start.find_or_start(home, WISHES)
    finally:
        os.sched_setaffinity(0, processors)
    well = well_of(home)
    names = {entry.partition("=")[0] for entry in Path(f"/proc/{well}/environ").read_text().split("\0")}
    assert "PYTHONPATH" in names
    assert not names & {"OMP_NUM_THREADS", "KMP_AFFINITY", "VLLM_TARGET_DEVICE", "LD_PRELOAD"}
    assert os.sched_getaffinity(well) >= processors
    assert os.readlink(f"/proc/{well}/cwd") == "/"
    assert os.getsid(well) != os.getsid(0)
    control.stop(home)


def test_a_well_found_by_home_and_ended_by_its_socket_has_ended_and_leaves_no_other_lock(home: Path) -> None:
    start.find_or_start(home, WISHES)
    place, well = start.rendezvous(home), well_of(home)
    left = place.socket.with_name(f"{place.socket.name}.lock")
    for there in (False, True):  # as an earlier version left it
        if there:
            start.find_or_start(home, WISHES)
            well = well_of(home)
            left.touch()
        ends = os.pidfd_open(well)
        try:
            control.stop(home, PATIENCE, socket=place.socket)
            assert select.select([ends], [], [], 0)[0], "its process has ended"
        finally:
            os.close(ends)
        assert left.exists() is there
