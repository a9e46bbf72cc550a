"""One well for several containers and users: it listens where its operator says, and admits whom it was told to."""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from wells import PATIENCE, Recorder, eventually, refused, scheduler, worker

from lab.rig.members import Unheard
from stepwell.client import control, start
from stepwell.client.finder import finder
from stepwell.client.membership import Membership
from stepwell.client.socket import dial
from stepwell.config import Settings, load
from stepwell.engines.vllm.settings import parse
from stepwell.errors import BackendDown, ConfigError, StepwellError
from stepwell.hierarchy.sessions.registry import SessionRegistry
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.hierarchy.sessions.session import Member, Peer
from stepwell.hierarchy.sessions.shares import Shares
from stepwell.io.paths import Rendezvous, check_socket_dir, trusted_owners
from stepwell.ops.checks import places
from stepwell.protocol.messages import Hello, Ready, SlabShared, Welcome
from stepwell.serve.process import run
from stepwell.testing.clock import SetClock
from stepwell.vault.keyring import Keyring

ROOT = os.geteuid() == 0
GUEST, STRANGER, GROUP = 65534, 65533, 65500  # numbers need no names
HOST = 64 << 20

SERVE = """
import json, sys
from pathlib import Path
from stepwell.config import load
from stepwell.serve.process import run
settings = load(Path(sys.argv[1]), {}, overrides=json.loads(sys.argv[2])).settings
run(Path(sys.argv[1]), settings, ready=lambda at: print(at, flush=True))
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short path; below it runtime directory, homes and sockets."""
    with tempfile.TemporaryDirectory(prefix="sw", dir="/tmp") as name:
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        for variable in [variable for variable in os.environ if variable.startswith("STEPWELL_")]:
            monkeypatch.delenv(variable)
        Path(name, "run").mkdir(mode=0o700)
        yield Path(name)


@pytest.fixture
def serve() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a well in a process of its own and returns when it listens."""
    wells: list[subprocess.Popen[str]] = []

    def begin(home: Path, **settings: Any) -> subprocess.Popen[str]:
        settings = {name: str(value) for name, value in {"host": "64MiB", **settings}.items()}
        command = [sys.executable, "-c", SERVE, str(home), json.dumps(settings)]
        well = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        wells.append(well)
        assert well.stdout is not None
        assert well.stdout.readline() == f"{settings.get('socket', start.rendezvous(home).socket)}\n"
        return well

    yield begin
    for well in wells:
        well.kill()
        well.wait()
        assert well.stdout is not None
        well.stdout.close()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A directory of ours for a socket that GROUP may reach and nobody but us can write to, nor any above it."""
    if not ROOT:
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory(prefix="sw", dir="/run") as name:
        os.chown(name, 0, GROUP)
        os.chmod(name, 0o2750)  # what is made in it belongs to its group
        yield Path(name)


def as_user(uid: int, call: Callable[[], object]) -> Any:
    """What `call` returns in a child process of that user and of GROUP; a StepwellError's code if it raises one."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(GROUP, GROUP, GROUP)
            os.setresuid(uid, uid, uid)
            try:
                answer = call()
            except StepwellError as error:
                answer = error.code
            os.write(write, json.dumps(answer).encode())
        except BaseException:  # noqa: BLE001 - shown here, since a child may not return
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer)


def join(path: Path, hello: Hello) -> Recorder:
    """A member that was welcomed; its process ends its link."""
    member = Recorder()
    dial(path)(hello, member)
    member.next(Welcome)
    return member


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw", ["allow_uids: 1000, 1001", "allow_uids: [1000, 1001]", "allow_uids:\n  - 1000\n  - 1001"]
)
def test_users_are_listed_or_written_in_one_text(tmp_path: Path, raw: str) -> None:
    (tmp_path / "stepwell.yaml").write_text(f"{raw}\nsocket: /run/stepwell/well.sock\n")
    settings = load(tmp_path, {}).settings
    assert (settings.allow_uids, settings.socket) == ((1000, 1001), Path("/run/stepwell/well.sock"))
    assert load(tmp_path, {"STEPWELL_ALLOW_UIDS": "7"}).settings.allow_uids == (7,)
    assert load(tmp_path, {"STEPWELL_ALLOW_UIDS": ""}).settings.allow_uids == ()


@pytest.mark.parametrize(
    "bad",
    [
        {"allow_uids": "root"},
        {"allow_uids": "-1"},
        {"allow_uids": str(2**32 - 1)},
        {"allow_uids": ",".join(map(str, range(65)))},
        {"socket": "well.sock"},
    ],
    ids=str,
)
def test_what_is_no_user_or_no_whole_path_is_refused(tmp_path: Path, bad: dict[str, str]) -> None:
    refused("SW-102", lambda: load(tmp_path, {}, overrides=bad), next(iter(bad)))


def test_allowed_users_need_a_socket_that_they_can_reach(folder: Path) -> None:
    refused("SW-102", lambda: run(folder / "home", Settings(host=HOST, allow_uids=(GUEST,))), "allow_uids")


def test_the_connector_takes_a_whole_path_of_bearable_length(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert parse({"home": str(tmp_path), "socket": "/run/w.sock"}, 16).socket == Path("/run/w.sock")
    refused("SW-102", lambda: parse({"socket": "w.sock"}, 16), "socket")
    refused("SW-102", lambda: parse({"socket": 7}, 16), "socket")
    refused("SW-109", lambda: parse({"socket": f"/run/{'w' * 108}"}, 16))
    monkeypatch.setenv("STEPWELL_SOCKET", "/run/e.sock")
    assert parse({"home": str(tmp_path)}, 16).socket == Path("/run/e.sock")


# --- the place --------------------------------------------------------------------------------------------------------


def test_nothing_that_is_not_ours_is_removed_from_the_sockets_place(folder: Path) -> None:
    path, home = folder / "run" / "well.sock", folder / "home"
    settings = Settings(host=HOST, socket=path)
    path.write_text("precious")
    refused("SW-102", lambda: run(home, settings), "not removed")
    assert path.read_text() == "precious"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        refused("SW-501", lambda: run(home, settings), str(os.getpid()))
        assert stat.S_ISSOCK(path.stat().st_mode)


def test_others_must_not_be_able_to_pose_as_the_well(folder: Path) -> None:
    path, directory = folder / "run" / "well.sock", folder / "run"
    for bits, shared, fine in [
        (0o700, False, True), (0o750, False, True), (0o770, False, False), (0o770, True, True), (0o757, True, False),
    ]:  # fmt: skip
        directory.chmod(bits)
        if fine:
            check_socket_dir(path, shared=shared)
        else:
            refused("SW-604", lambda shared=shared: check_socket_dir(path, shared=shared), oct(bits)[2:])
    directory.chmod(0o777)
    refused("SW-604", lambda: run(folder / "home", Settings(host=HOST, socket=path)), "could put files there")
    refused("SW-604", lambda: run(folder / "home", Settings(host=HOST, socket=folder / "none" / "s")), "No such file")
    refused("SW-604", lambda: check_socket_dir(folder / "none" / "s", shared=False), f"GROUP {folder}/none")
    refused("SW-109", lambda: run(folder / "home", Settings(host=HOST, socket=folder / ("s" * 100))))


def test_no_fix_is_about_a_directory_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`install -d -o USER /tmp`, as root, breaks the machine."""
    there = {"/tmp", "/run/stepwell"}
    monkeypatch.setattr(os.path, "lexists", lambda path: str(path) in there)
    for socket_path in ("/tmp/well.sock", "/run/stepwell/well.sock"):
        with pytest.raises(StepwellError) as caught:
            check_socket_dir(Path(socket_path), shared=False)
        assert caught.value.fix.endswith(" -g GROUP /run/stepwell1")
    there.discard("/run/stepwell")
    with pytest.raises(StepwellError) as caught:
        check_socket_dir(Path("/tmp/well.sock"), shared=False)
    assert caught.value.fix.endswith(" -g GROUP /run/stepwell")


def test_only_who_alone_could_have_made_the_socket_is_believed(folder: Path, open_folder: Path) -> None:
    directory = open_folder / "of a guest"
    directory.mkdir(mode=0o750)
    os.chown(directory, GUEST, GROUP)
    assert trusted_owners(directory / "s") == {0, GUEST}
    directory.chmod(0o770)
    assert trusted_owners(directory / "s") == {0, GUEST}, "the group is the owner's choice"
    directory.chmod(0o757)
    assert trusted_owners(directory / "s") == {0}
    directory.chmod(0o750)
    os.chown(open_folder, STRANGER, GROUP)
    assert trusted_owners(directory / "s") == {0}, "a stranger could exchange the directory"
    os.chown(folder / "run", GUEST, GROUP)
    assert trusted_owners(folder / "run" / "s") == {0}, "/tmp is everybody's"
    assert trusted_owners(open_folder / "none" / "s") == {0}


def test_one_socket_has_one_well(folder: Path, serve: Callable[..., subprocess.Popen[str]]) -> None:
    path = folder / "run" / "well.sock"
    well = serve(folder / "home", socket=path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    refused("SW-501", lambda: run(folder / "other", Settings(host=HOST, socket=path)), str(well.pid))
    refused("SW-501", lambda: run(folder / "home", Settings(host=HOST)))
    assert control.stats(folder, socket=path)["pid"] == well.pid
    well.kill()
    well.wait()
    refused("SW-505", lambda: control.stats(folder, socket=path), str(path))
    second = serve(folder / "home", socket=path)
    control.stop(folder, socket=path)
    assert not path.exists()
    assert serve(folder / "home", socket=path).pid != second.pid, "all its locks are free once it has stopped"


def test_metrics_and_the_doctor_ask_the_well_where_it_listens(
    folder: Path, serve: Callable[..., subprocess.Popen[str]]
) -> None:
    path, metrics = folder / "run" / "well.sock", folder / "run" / "metrics.sock"
    serve(folder / "home", socket=path, metrics=metrics)
    with socket.socket(socket.AF_UNIX) as scraper:
        scraper.settimeout(PATIENCE)
        scraper.connect(str(metrics))
        scraper.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        answer = b""
        while data := scraper.recv(1 << 16):
            answer += data
    assert b" 200 " in answer and b"stepwell_uptime_seconds" in answer
    (check,), _ = places.well(folder / "home", path, shared=False)
    assert (check.status, "answers in" in check.text) == ("ok", True)
    (check,), _ = places.well(folder / "home", folder / "run" / "none", shared=False)
    assert "none listens" in check.text
    (folder / "run").chmod(0o770)
    refused("SW-604", lambda: places.well(folder / "home", path, shared=False))


# --- engines join it and never start it -------------------------------------------------------------------------------


def test_an_engine_joins_when_the_well_comes_and_starts_none(
    folder: Path, serve: Callable[..., subprocess.Popen[str]]
) -> None:
    path, told = folder / "run" / "well.sock", []
    find = finder(folder / "engine", path, {})
    refused("SW-505", find, f"no well is running at {path}")
    member = Recorder()
    heard = threading.Event()

    def trouble(error: StepwellError) -> None:
        told.append(error.code)
        heard.set()

    membership = Membership(scheduler, find, member, trouble)
    membership.begin(threaded=True)
    assert heard.wait(PATIENCE)
    well = serve(folder / "home", socket=path)
    member.next(Welcome)
    well.send_signal(signal.SIGKILL)
    assert member.ended.wait(PATIENCE)
    serve(folder / "home", socket=path)
    member.next(Welcome)
    membership.close()
    assert told[0] == "SW-505"
    assert not (folder / "engine").exists(), "a home is for those who start wells"


def test_an_engine_does_not_start_a_well_that_it_would_not_find(folder: Path) -> None:
    home = folder / "home"
    home.mkdir(mode=0o700)
    (home / "stepwell.yaml").write_text(f"socket: {folder}/run/well.sock\n")
    with pytest.raises(ConfigError) as caught:
        start.find_or_start(home, {"host": "64MiB"})
    assert caught.value.code == "SW-102" and "kv_connector_extra_config" in caught.value.fix
    with pytest.raises(BackendDown):
        start.find(home)


# --- several users ----------------------------------------------------------------------------------------------------


def test_a_guests_engine_is_served_and_may_change_nothing(
    folder: Path, open_folder: Path, serve: Callable[..., subprocess.Popen[str]]
) -> None:
    path = open_folder / "well.sock"
    well = serve(folder / "home", socket=path, allow_uids=f"{GUEST},12345")
    status = path.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o660, GROUP)

    def session() -> object:
        first, second = join(path, scheduler("guest")), join(path, worker("guest"))
        first.next(Ready)
        slab, fds = second.next(SlabShared)  # the same memory that ours has
        with mmap.mmap(fds[0], slab.nbytes) as view:
            view[slab.offset] = 1
        return control.stats(folder, socket=path)["sessions"]

    ours = [join(path, scheduler()), join(path, worker())]
    for member in ours:
        member.next(Ready)
    os.close(ours[1].next(SlabShared)[1][0])
    assert as_user(GUEST, session) == 2, "beside ours"
    assert as_user(GUEST, lambda: control.ping(folder, socket=path) > 0)
    assert as_user(GUEST, lambda: control.stop(folder, socket=path)) == "SW-606"
    assert as_user(STRANGER, lambda: control.stats(folder, socket=path)) == "SW-606"
    eventually(lambda: control.stats(folder, socket=path)["sessions"] == 1)
    assert control.stats(folder, socket=path)["pid"] == well.pid, "it still serves"
    control.stop(folder, socket=path)


def test_no_users_process_speaks_for_an_engine_of_another_one(
    folder: Path, open_folder: Path, serve: Callable[..., subprocess.Popen[str]]
) -> None:
    path = open_folder / "well.sock"
    serve(folder / "home", socket=path, allow_uids=GUEST)
    ours = join(path, scheduler())
    ready, hold = os.pipe(), os.pipe()

    def pose() -> None:
        join(path, worker())
        os.write(ready[1], b"!")
        os.read(hold[0], 1)

    poser = threading.Thread(target=as_user, args=(GUEST, pose), daemon=True)
    poser.start()
    assert os.read(ready[0], 1)
    try:
        right = join(path, worker())  # would be refused if the guest's had taken its place
        right.next(Ready)
        ours.next(Ready)
    finally:
        os.write(hold[1], b"!")
        poser.join(PATIENCE)
    for fd in (*ready, *hold):
        os.close(fd)


def test_members_of_a_session_are_of_one_user_and_tenant() -> None:
    registry = SessionRegistry(SetClock(), Shares(1), Sealing(Keyring.ephemeral(), sealed=True, wall=lambda: 1.0))

    def session_of(uid: int, tenant: str, hello: Hello) -> object:
        return registry.enter(Peer(uid, 1, True, tenant), hello, Unheard()).session

    ours = session_of(1, "default", scheduler())
    assert session_of(2, "default", worker()) is not ours
    assert session_of(1, "another", worker()) is not ours
    assert session_of(1, "default", worker()) is ours


def test_no_users_process_vouches_for_what_an_engine_of_another_one_left() -> None:
    registry = SessionRegistry(SetClock(), Shares(1), Sealing(Keyring.ephemeral(), sealed=True, wall=lambda: 1.0))

    def enter(uid: int, hello: Hello) -> Member:
        peer = Peer(uid, 1, watched=True, tenant="default")
        return registry.enter(peer, hello, Unheard())

    session = enter(1, scheduler()).session
    enter(1, worker())
    registry.open(session)
    claims = msgspec.structs.replace(worker(), acknowledges=[session.number])
    assert registry.disowned(enter(2, claims)) == []
    assert registry.disowned(enter(1, claims)) == [session]
    quarantine = registry.leave(session)
    assert quarantine is not None
    assert registry.acknowledged(enter(3, claims)) == []
    assert registry.acknowledged(enter(1, msgspec.structs.replace(claims, engine="other"))) == []
    (member,) = (m for s in registry.sessions.values() if s.engine == (1, "default", "engine") for m in s.members)
    assert registry.acknowledged(member) == [quarantine]


def test_root_may_end_anybodys_well(folder: Path, open_folder: Path) -> None:
    path, home = open_folder / "well.sock", folder / "home"
    for place in (folder, open_folder):
        place.chmod(0o755)
    home.mkdir(mode=0o700)
    for place in (home, open_folder):
        os.chown(place, GUEST, GROUP)
    listening, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setresgid(GROUP, GROUP, GROUP)
            os.setresuid(GUEST, GUEST, GUEST)
            os.environ["TMPDIR"] = str(home)
            run(home, Settings(host=HOST, socket=path), ready=lambda _: os.write(write, b"!") and None)
        finally:
            os._exit(0)
    os.close(write)
    try:
        assert os.read(listening, 1), "it serves"
        control.stop(folder, socket=path)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        status = os.waitpid(child, 0)[1]
        os.close(listening)
    assert status == 0


def test_the_name_of_the_lock_is_the_sockets(tmp_path: Path) -> None:
    assert Rendezvous.named(tmp_path / "w.sock") == Rendezvous(tmp_path / "w.sock", tmp_path / "w.sock.lock")
