"""Several tenants of one well: whose a connection is follows from its user or its socket, and nothing crosses."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_shared_well import GUEST, HOST, ROOT, STRANGER, as_user, folder, join, open_folder, refused, serve
from typer.testing import CliRunner
from wells import eventually, scheduler, worker

from lab.rig.members import FakeEngine, Rig, Unheard
from stepwell.block.tier import WellStats
from stepwell.cli.commands import app
from stepwell.cli.output import stats_table
from stepwell.client import control
from stepwell.config import Settings, Tenant, check_together, load, texts
from stepwell.hierarchy.sessions.registry import SessionRegistry
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.hierarchy.sessions.session import Member, Peer
from stepwell.hierarchy.sessions.shares import Shares
from stepwell.ops.checks import places
from stepwell.ops.checks.check import guarded
from stepwell.protocol.messages import Hello, Ready, SlabShared
from stepwell.serve.process import run
from stepwell.serve.server.gates import gate_plans, opened
from stepwell.testing.clock import SetClock
from stepwell.vault.keyring import Keyring

__all__ = ["folder", "open_folder", "serve"]  # fixtures

WELL = "/run/w.sock"


# --- settings ---------------------------------------------------------------------------------------------------------


def test_tenants_are_named_in_the_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "stepwell.yaml"
    file.write_text("tenants:\n  alice: {uids: [1001]}\n  batch:\n    socket: /run/b.sock\n    uids: 1002, 1003\n")
    loaded = load(tmp_path, {"STEPWELL_TENANTS__ALICE__UIDS": "7", "STEPWELL_TENANTS__BOB__SOCKET": "/run/c.sock"})
    assert loaded.settings.tenants == {
        "alice": Tenant(uids=(7,)),
        "batch": Tenant(uids=(1002, 1003), socket=Path("/run/b.sock")),
        "bob": Tenant(socket=Path("/run/c.sock")),
    }
    assert loaded.origins["tenants"].startswith("env STEPWELL_TENANTS")
    shown = texts(loaded.settings)["tenants"]
    assert shown == "alice: uids 7; batch: uids 1002,1003, socket /run/b.sock; bob: socket /run/c.sock"
    assert json.loads(json.dumps(loaded.settings.model_dump(mode="json")))["tenants"]["alice"]["uids"] == ["7"]


@pytest.mark.parametrize(
    ("raw", "code", "shown"),
    [
        ("tenants: {a: {uid: [1]}}", "SW-101", "did you mean tenants.NAME.uids?"),
        ("tenants: {a: {uids: {b: 1}}}", "SW-101", "tenants.NAME.uids is one value"),
        ("tenants: 7", "SW-102", "is a group of settings"),
        ("tenants: {a: 7}", "SW-102", "is a group of settings"),
        ("tenants: {default: {uids: 1}}", "SW-102", "yaml:1: tenants cannot be used"),
        ("tenants: {Alice: {uids: 1}}", "SW-102", "'Alice' cannot name a tenant"),
        ("tenants: {a.b: {uids: 1}}", "SW-102", "cannot name"),
        ("tenants: {'../x': {uids: 1}}", "SW-102", "cannot name"),
        (f"tenants: {{{'a' * 33}: {{uids: 1}}}}", "SW-102", "cannot name"),
        ("tenants: {a: {uids: nobody}}", "SW-102", "tenants.a.uids"),
        ("tenants: {a: {socket: s.sock}}", "SW-102", "not an absolute path"),
        (f"tenants: {{{', '.join(f't{n}: {{uids: {n}}}' for n in range(65))}}}", "SW-102", "at most 64"),
        ("tenants: {a: {uids: 1}, a: {uids: 2}}", "SW-105", "set twice"),
    ],
)
def test_what_is_no_tenant_is_refused(tmp_path: Path, raw: str, code: str, shown: str) -> None:
    (tmp_path / "stepwell.yaml").write_text(raw)
    refused(code, lambda: load(tmp_path, {}), shown)


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"tenants": {"a": {}}}, "neither users nor a socket"),
        ({"tenants": {"a": {"uids": "1"}}}, "tenants.a.uids = 1 has no effect"),
        ({"socket": WELL, "tenants": {"a": {"uids": "1,2"}, "b": {"uids": "2"}}}, "user 2 is in tenants.a.uids and"),
        ({"socket": WELL, "allow_uids": "3", "tenants": {"a": {"uids": "3"}}}, "user 3 is in allow_uids and"),
        ({"socket": WELL, "tenants": {"a": {"socket": WELL}}}, "socket and tenants.a.socket are both"),
        (
            {"tenants": {"a": {"socket": "/r/x"}, "b": {"socket": "/r/./y/../x"}}},
            "tenants.a.socket and tenants.b.socket",
        ),
        ({"socket": WELL, "tenants": {"a": {"socket": f"{WELL}.lock"}}}, "the lock of socket"),
        ({"metrics": "/r/m", "tenants": {"a": {"socket": "/r/m"}}}, "tenants.a.socket and metrics"),
    ],
)
def test_a_user_or_socket_has_one_tenant(settings: dict[str, object], shown: str) -> None:
    refused("SW-102", lambda: check_together(Settings(**settings)), shown)  # type: ignore[arg-type]


def test_a_user_may_be_of_two_tenants_at_two_sockets() -> None:
    """And of the well's own at the main one: what matters is the gate."""
    tenants = {"a": {"uids": "7", "socket": "/r/a"}, "b": {"uids": "7", "socket": "/r/b"}, "c": {"uids": "9"}}
    settings = Settings(host=HOST, socket=WELL, allow_uids="7", tenants=tenants)  # type: ignore[arg-type]
    check_together(settings)
    main, a, b = gate_plans(settings, Path(WELL), 1000)
    assert main.tenants == {1000: "default", 0: "default", 7: "default", 9: "c"}
    assert main.operators == {1000, 0} and main.shared
    assert (a.path, a.tenants, a.operators, a.shared) == (Path("/r/a"), {1000: "a", 0: "a", 7: "a"}, frozenset(), True)
    assert (b.path, b.tenants[7]) == (Path("/r/b"), "b")


def test_the_wells_own_user_is_no_other_tenant_at_the_main_gate() -> None:
    tenants = {"a": {"uids": "1000"}}
    settings = Settings(host=HOST, socket=WELL, tenants=tenants)  # type: ignore[arg-type]
    refused("SW-102", lambda: gate_plans(settings, Path(WELL), 1000), "user 1000 runs this well")
    assert gate_plans(settings, Path(WELL), 1)[0].tenants[1000] == "a"


def test_each_gate_has_a_mode_of_its_own(folder: Path) -> None:
    tenants = {"a": {"socket": str(folder / "a"), "uids": "7"}, "b": {"socket": str(folder / "b")}}
    settings = Settings(host=HOST, tenants=tenants)  # type: ignore[arg-type]
    modes = []
    for plan in gate_plans(settings, folder / "main", os.geteuid()):
        with opened(plan) as gate:
            modes.append(stat.S_IMODE(plan.path.stat().st_mode))
            assert gate.listener.getsockname() == str(plan.path)
        assert not plan.path.exists()
    assert modes == [0o600, 0o660, 0o600]


# --- keys -------------------------------------------------------------------------------------------------------------


def test_the_keyring_gains_tenants_and_never_loses_one(tmp_path: Path) -> None:
    path = tmp_path / "keyring"
    first = Keyring.open(path)
    more = Keyring.open(path, ("default", "a", "b"))
    assert [keys.name for keys in more.tenants] == ["default", "a", "b"]
    assert more.tenants[0] == first.tenants[0], "keys that are there stay"
    assert len({keys.epochs[0].key for keys in more.tenants}) == 3
    raw = path.read_bytes()
    assert Keyring.open(path, ("default", "b")) == Keyring.open(path) == more, "who left the settings keeps the keys"
    assert path.read_bytes() == raw and os.listdir(tmp_path) == ["keyring"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [keys.name for keys in Keyring.open(tmp_path / "new", ("default", "c")).tenants] == ["default", "c"]


def test_tenants_that_are_added_at_once_all_stay(tmp_path: Path) -> None:
    path = tmp_path / "keyring"
    Keyring.open(path)
    names = [f"t{n}" for n in range(8)]
    children = []
    for name in names:
        child = os.fork()
        if child == 0:
            try:
                Keyring.open(path, ("default", name))
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    assert {keys.name for keys in Keyring.read(path).tenants} == {"default", *names}
    assert os.listdir(tmp_path) == ["keyring"]


def test_an_addition_that_is_cut_off_leaves_the_keyring_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keyring"
    Keyring.open(path)
    raw = path.read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    refused("SW-605", lambda: Keyring.open(path, ("default", "a")), "No space left")
    assert path.read_bytes() == raw and os.listdir(tmp_path) == ["keyring"]


# --- one state machine ------------------------------------------------------------------------------------------------


def test_a_digest_has_another_id_and_other_slabs_for_each_tenant() -> None:
    rig = Rig(64 << 20, seed=1, keyring=Keyring.ephemeral(("default", "a", "b")))
    a, b = (FakeEngine(rig, name="same", tenant=tenant) for tenant in "ab")
    rig.settle()
    chain = bytes(range(96))
    assert a.spill(chain) == 3
    assert (a.found(chain), b.found(chain)) == (3, 0)
    ids = set(rig.hierarchy.index)
    assert b.spill(chain, word=9) == 3, "as if nobody had it"
    assert len(rig.hierarchy.index) == 6 and ids < set(rig.hierarchy.index)
    assert not set(a.workers[0].shared) & set(b.workers[0].shared)
    assert {slab.owner.tenant for slab in rig.hierarchy.slabs.slabs.values()} == {"a", "b"}
    assert a.session != b.session
    rig.hierarchy.close()


def test_a_session_has_members_of_one_tenant_whatever_they_call_themselves() -> None:
    registry = SessionRegistry(SetClock(), Shares(1), Sealing(Keyring.ephemeral(), sealed=True, wall=lambda: 1.0))

    def enter(tenant: str, hello: Hello) -> Member:
        peer = Peer(1, 1, watched=True, tenant=tenant)
        return registry.enter(peer, hello, Unheard())

    session = enter("a", scheduler()).session
    assert enter("b", worker()).session is not session
    assert enter("a", worker()).session is session
    registry.open(session)
    claims = msgspec.structs.replace(worker("engine"), acknowledges=[session.number])
    stranger = enter("c", claims)
    assert registry.disowned(stranger) == []
    quarantine = registry.leave(session)
    assert quarantine is not None and registry.acknowledged(stranger) == []
    assert registry.acknowledged(enter("a", claims)) == [quarantine]


def test_what_a_tenant_is_told_of_the_well_does_not_depend_on_the_others() -> None:
    rig = Rig(64 << 20, seed=1, keyring=Keyring.ephemeral(("default", "a", "b")))
    a = FakeEngine(rig, tenant="a")
    rig.settle()
    before = rig.hierarchy.stats_of("b")
    FakeEngine(rig, name="more", tenant="a")
    a.spill(bytes(range(96)))
    assert rig.hierarchy.stats_of("b") == before
    assert rig.hierarchy.stats_of("a")["sessions"] == 2
    assert "tenant b: 0 session(s)" in stats_table(WellStats(before))
    rig.hierarchy.close()


# --- a well -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def both(folder: Path, serve: Callable[..., object]) -> Iterator[tuple[Path, Path, Path]]:
    """A well, met at the sockets of the operator, of tenant a and of tenant b."""
    home, run_ = folder / "home", folder / "run"
    home.mkdir(mode=0o700)
    (home / "stepwell.yaml").write_text(f"tenants:\n  a: {{socket: {run_}/a.sock}}\n  b: {{socket: {run_}/b.sock}}\n")
    serve(home, socket=run_ / "main.sock")
    yield run_ / "main.sock", run_ / "a.sock", run_ / "b.sock"


def test_the_socket_says_whose_an_engine_is(both: tuple[Path, Path, Path], folder: Path) -> None:
    main, at_a, at_b = both
    members = [(join(at, scheduler()), join(at, worker())) for at in both]
    slabs = []
    for first, second in members:
        first.next(Ready)
        second.next(Ready)
        slab, fds = second.next(SlabShared)
        slabs.append(os.fstat(fds[0]).st_ino)
        os.close(fds[0])
        assert slab.slots
    assert len(set(slabs)) == 3, "each tenant has memory of its own"
    assert control.stats(folder, socket=main)["sessions"] == 3
    for at, name in ((at_a, "a"), (at_b, "b")):
        told = control.stats(folder, socket=at)
        shown = {"well", "uptime_s", "tenant", "sessions", "paused_recalls", "paused_spills", "host_bytes", "pid"}
        assert told.keys() == shown
        assert (told["tenant"], told["sessions"]) == (name, 1)
    (checks, held) = places.well(folder, at_a)
    assert checks[0].status == "ok" and held == 0


def test_at_a_tenants_socket_nobody_is_the_operator(both: tuple[Path, Path, Path], folder: Path) -> None:
    """Not even the well's own user, which is who a container with nothing but this socket may run as."""
    main, at_a, _ = both
    assert control.ping(folder, socket=at_a) > 0
    refused("SW-606", lambda: control.stop(folder, socket=at_a), "main socket")
    refused("SW-606", lambda: control.namespaces(folder, socket=at_a), f"user {os.geteuid()} may not give this command")
    refused("SW-606", lambda: control.clear(folder, ["host"], socket=at_a))
    assert control.namespaces(folder, socket=main) == []
    control.stop(folder, socket=main)
    assert not at_a.exists()


def test_a_wells_sockets_are_its_own_while_it_runs(both: tuple[Path, Path, Path], folder: Path) -> None:
    _, at_a, _ = both
    tenants = {"x": {"socket": str(at_a)}}
    settings = Settings(host=HOST, tenants=tenants)  # type: ignore[arg-type]
    refused("SW-501", lambda: run(folder / "other", settings), "at its socket")
    assert control.ping(folder, socket=at_a) > 0


def test_the_doctor_looks_at_each_tenant(folder: Path) -> None:
    run_ = folder / "run"

    def checks(metrics: str = "", **tenants: object) -> list[tuple[str, str]]:
        settings = {"socket": str(run_ / "w"), "tenants": tenants, "metrics": metrics or str(run_ / "m")}
        loaded = Settings(**settings)  # type: ignore[arg-type]
        found = [check for name in tenants for check in guarded("tenant", partial(places.tenant, loaded, name), name)]
        return [(check.status, check.text) for check in found]

    apart = {"socket": str(run_ / "a")}
    assert checks(a=apart) == [("ok", f"the well's own user at {run_}/a")]
    (status, text), other = checks(a={"uids": "7,8"}, b=apart)
    assert status == "warn" and "users 7, 8" in text and "only its owner may enter" in text and other[0] == "ok"
    run_.chmod(0o750)
    assert checks(a={"uids": "7"}) == [("ok", f"users 7 at {run_}/w, told apart by user")]
    assert [found[0] for found in checks("127.0.0.1:9464", a={"uids": "7"})] == ["warn"]
    ((status, text),) = checks(a={"socket": str(folder / "none" / "a")})
    assert status == "fail" and "SW-604" in text


def test_uninstall_takes_the_tenants_sockets_too(folder: Path, serve: Callable[..., Any]) -> None:
    home, at = folder / "home", folder / "run" / "a.sock"
    home.mkdir(mode=0o700)
    (home / "stepwell.yaml").write_text(f"tenants: {{a: {{socket: {at}}}}}\n")
    well = serve(home)
    well.kill()
    well.wait()
    assert at.exists() and at.with_name("a.sock.lock").exists(), "what SIGKILL leaves"
    done = CliRunner().invoke(app, ["uninstall", "--home", str(home), "--yes", "--only", "home"])
    assert done.exit_code == 0, done.output
    assert os.listdir(folder / "run") == []


@pytest.mark.skipif(not ROOT, reason="only root can become another user")
def test_the_user_says_whose_an_engine_is(folder: Path, open_folder: Path, serve: Callable[..., object]) -> None:
    home, main, apart = folder / "home", open_folder / "well.sock", open_folder / "b.sock"
    home.mkdir(mode=0o700)
    (home / "stepwell.yaml").write_text(
        f"tenants:\n  a: {{uids: [{GUEST}]}}\n  b: {{socket: {apart}, uids: [{GUEST}]}}\n"
    )
    serve(home, socket=main)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (main, apart)] == [0o660, 0o660]

    def tenant(at: Path) -> Callable[[], object]:
        return lambda: control.stats(folder, socket=at).get("tenant", "all of it")

    assert tenant(main)() == "all of it" and tenant(apart)() == "b"
    assert as_user(GUEST, tenant(main)) == "a"
    assert as_user(GUEST, tenant(apart)) == "b"
    assert as_user(STRANGER, tenant(main)) == as_user(STRANGER, tenant(apart)) == "SW-606"
    assert as_user(GUEST, lambda: control.namespaces(folder, socket=main)) == "SW-606"
    assert as_user(GUEST, lambda: control.clear(folder, ["host"], socket=main)) == "SW-606"
    assert as_user(GUEST, lambda: control.stop(folder, socket=apart)) == "SW-606"


@pytest.mark.skipif(not ROOT, reason="only root can become another user")
def test_no_worker_of_one_tenant_completes_an_engine_of_another(
    folder: Path, open_folder: Path, serve: Callable[..., object]
) -> None:
    """The same user, the same engine's name: only the socket differs."""
    home, main, apart = folder / "home", open_folder / "well.sock", open_folder / "b.sock"
    home.mkdir(mode=0o700)
    (home / "stepwell.yaml").write_text(f"tenants: {{b: {{socket: {apart}}}}}\n")
    serve(home, socket=main)
    ours = join(main, scheduler())
    join(apart, worker())
    eventually(lambda: control.stats(folder, socket=main)["sessions"] == 2)
    assert ours.messages.empty(), "it is not complete"
    right = join(main, worker())
    right.next(Ready)
    ours.next(Ready)
