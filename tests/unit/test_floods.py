"""A client that floods the well: each message and session costs bounded work and memory, and others get theirs."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_hierarchy import chain, joined, make_rig
from wells import MIB, PATIENCE, InThread, Raw, Recorder, eventually, scheduler, worker
from wells import well as well

from lab.rig.members import FakeEngine, FakeMember, Rig
from stepwell.block.namespace import DEFAULT_TENANT
from stepwell.client.identity import WorkerIdentity
from stepwell.client.socket import dial
from stepwell.client.worker import WorkerClient
from stepwell.errors import ProtocolError
from stepwell.hierarchy.local import open_well
from stepwell.hierarchy.sessions import registry, shares
from stepwell.hierarchy.sessions.shares import OVERHEAD, Shares
from stepwell.protocol import messages as m
from stepwell.protocol import wire
from stepwell.serve.server import admin
from stepwell.serve.server import connection as connection_module
from stepwell.serve.server import server as server_module
from stepwell.serve.server.connection import MAX_HELLO, Connection
from stepwell.serve.server.gates import Gate
from stepwell.testing.arena_kit import SLAB

MANY = [7] * (m.MAX_LISTED + 1)
TOO_LONG: dict[str, tuple[str, Any]] = {
    "filled": ("worker", m.Filled(MANY, [])),
    "dropped": ("worker", m.Filled([], MANY)),
    "recalled": ("worker", m.Recalled(MANY)),
    "abandoned": ("scheduler", m.Abandon(MANY)),
    "asked": ("scheduler", m.Ask(1, 0, 0, bytes(32 * m.MAX_DIGESTS + 32))),
    "looked for": ("scheduler", m.Look(1, 0, bytes(32 * m.MAX_DIGESTS + 32))),
    "forgotten": ("scheduler", m.Forget(0, bytes(32 * m.MAX_DIGESTS + 32))),
    "missing": ("scheduler", m.Release(1, no_place=m.NoPlace(1, 1, 1, [(0, 1)] * (m.MAX_GROUPS + 1)))),
    "reported": ("scheduler", m.Report({f"n{n}": 1 for n in range(m.MAX_COUNTS + 1)})),
}


@pytest.fixture
def rig() -> Rig:
    return make_rig()


# one message ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", TOO_LONG)
def test_a_list_that_no_engine_sends_ends_its_session_and_counts(rig: Rig, case: str) -> None:
    role, message = TOO_LONG[case]
    other, engine = joined(rig, name="other"), joined(rig)
    guilty = engine.scheduler if role == "scheduler" else engine.workers[0]
    guilty.say(message)
    assert [refused.code for refused in guilty.take(m.Refused)] == ["SW-802"]
    assert (engine.live, other.live) == (False, True)
    assert rig.hierarchy.stats()["messages_refused"] == 1


@pytest.mark.parametrize("case", ["filled", "dropped", "recalled", "abandoned", "missing", "reported"])
def test_a_list_that_no_engine_sends_is_not_even_decoded(case: str) -> None:
    with pytest.raises(ProtocolError, match="of length <= "):
        list(wire.Reader(wire.from_engine).feed(wire.frame(TOO_LONG[case][1])))


def test_the_longest_lists_are_served(rig: Rig) -> None:
    engine, most = joined(rig), [7] * m.MAX_LISTED
    for message in (m.Filled(most, most), m.Recalled(most)):
        assert list(wire.Reader(wire.from_engine).feed(wire.frame(message))) == [message]
        assert len(wire.frame(message)) <= m.MAX_ACKNOWLEDGED
        engine.workers[0].say(message)
    engine.scheduler.say(m.Abandon(most))
    assert len(wire.frame(m.Ask(1, 1, 1, bytes(32 * m.MAX_DIGESTS)))) <= m.MAX_ASKED
    assert engine.live


class NeverSearched(list[int]):
    def __contains__(self, number: object) -> bool:
        raise AssertionError("that takes as long as the list is, for each of another one")


def test_an_acknowledgement_takes_as_long_as_it_is(rig: Rig) -> None:
    engine = joined(rig)
    leases, _ = engine.reserve(chain(4))
    engine.workers[0].say(m.Filled(NeverSearched(leases), NeverSearched([1 << 40] * 100)))
    assert rig.hierarchy.stats()["spilled_blocks"] == 4


def test_what_is_said_to_be_dropped_is_not_published_whatever_else_is_said(rig: Rig) -> None:
    engine = joined(rig)
    leases, _ = engine.reserve(chain(2))
    for piece in m.pieces(m.Filled([*leases, *range(1000, 1100)], leases[:1])):
        engine.workers[0].say(piece)
    rig.settle()
    assert rig.hierarchy.stats()["spilled_blocks"] == 1
    assert engine.found(chain(2)) == 0, "it was the first"


@given(st.lists(st.integers(1, 9), max_size=300), st.lists(st.integers(1, 9), max_size=300))
def test_pieces_say_the_same_in_short_lists(leases: list[int], dropped: list[int]) -> None:
    pieces = list(m.pieces(m.Filled(leases, dropped)))
    assert all(isinstance(p, m.Filled) and len(p.leases) + len(p.dropped) <= m.PIECE for p in pieces)
    assert [n for p in pieces for n in p.leases] == leases  # type: ignore[union-attr]
    assert [n for p in pieces for n in p.dropped] == dropped  # type: ignore[union-attr]
    for whole in (m.Abandon(leases), m.Recalled(leases)):
        lists = [next(iter(getattr(p, name) for name in p.__struct_fields__)) for p in m.pieces(whole)]
        assert list(itertools.chain(*lists)) == leases and max(map(len, lists)) <= m.PIECE
    assert list(m.pieces(m.Ping(1))) == [m.Ping(1)]


def test_a_connection_brings_long_lists_in_pieces() -> None:
    ours, theirs = socket.socketpair()
    connection = Connection(ours, Gate(ours, {}))
    theirs.sendall(wire.frame(m.Recalled(list(range(3 * m.PIECE)))))
    found = connection.receive()
    assert found is not None
    assert [len(piece.transfers) for piece in found if isinstance(piece, m.Recalled)] == [m.PIECE] * 3
    connection.close()
    theirs.close()


def test_a_client_says_in_several_messages_what_is_too_long_for_one() -> None:
    with open_well("64MiB") as local:
        named = WorkerIdentity("engine", 0, 1, MIB, b"l" * 32)
        client = WorkerClient(named, lambda: local.dial, trouble=print, threaded=False)
        local.dial(scheduler(), Recorder())
        (session,) = local.hierarchy.registry.sessions
        client.filled(session, range(1, 3 * m.MAX_LISTED), range(2 * m.MAX_LISTED))
        client.recalled(session, range(3 * m.MAX_LISTED))
        assert session in local.hierarchy.registry.sessions
        client.close()


def test_what_changes_nothing_has_nobody_look_again(rig: Rig) -> None:
    engine = joined(rig)
    assert not rig.hierarchy._core.news.any
    engine.scheduler.say(m.Abandon([1 << 40]))
    engine.workers[0].say(m.Mapped(next(iter(engine.workers[0].shared))))
    assert not rig.hierarchy._core.news.any


# what waits -----------------------------------------------------------------------------------------------------------


def test_what_a_session_may_ask_at_a_time_is_bounded_and_more_is_a_miss(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, digests = joined(rig), chain(4)
    engine.spill(digests)
    monkeypatch.setattr(shares, "MAX_HELD_BY_ONE", 2 * (len(digests) + OVERHEAD))
    tickets = [engine.ask(digests) for _ in range(3)]
    rig.settle()
    assert [len(engine.answer(ticket).refs) for ticket in tickets] == [4, 4, 0]
    refused = engine.answer(tickets[2])
    assert (refused.more, refused.reason) == (False, "queue_full")
    assert rig.hierarchy.stats()["misses_queue_full"] == 4
    for ticket in tickets:
        engine.release(ticket)
    rig.settle()
    assert engine.found(digests) == 4
    assert not rig.hierarchy.held.by_tenant and engine.live


def test_questions_that_are_taken_back_at_once_do_not_pile_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MAX_HELD_BY_ONE", 10 * (32 + OVERHEAD))
    engine = joined(rig)
    for _ in range(100):
        engine.release(engine.ask(chain(1)))
    assert len(rig.hierarchy._core.work._waiting) <= 10
    rig.settle()
    assert not rig.hierarchy.held.by_tenant
    assert engine.found(chain(1)) == 0 and engine.live


def test_reservations_do_not_pile_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MAX_HELD_BY_ONE", 3 * (32 + OVERHEAD))
    engine = joined(rig)
    for n in range(10):
        engine.scheduler.say(m.Reserve(n, 0, b"", chain(1, n)))
    assert len(rig.hierarchy._core.work._waiting) <= 3
    rig.settle()
    taken = [lease > 0 for granted in engine.scheduler.take(m.Granted) for lease in granted.leases]
    assert (len(taken), sum(taken)) == (10, 3)
    assert rig.hierarchy.stats()["spills_refused_queue_full"] == 7
    assert not rig.hierarchy.held.by_tenant


def test_what_waits_to_be_forgotten_is_bounded(rig: Rig) -> None:
    engine = joined(rig)
    half = bytes(16 * m.MAX_DIGESTS)
    engine.scheduler.say(m.Forget(0, half))
    engine.scheduler.say(m.Forget(0, half[:-OVERHEAD]))
    assert engine.live
    engine.scheduler.say(m.Forget(0, bytes(32)))
    assert not engine.live


def test_what_ends_with_its_session_waits_no_more(rig: Rig) -> None:
    engine = joined(rig)
    for n in range(20):
        engine.ask(chain(2, n))
        engine.scheduler.say(m.Look(n, 0, chain(2, n)))
        engine.scheduler.say(m.Reserve(n, 0, b"", chain(2, n)))
    for member in engine.members:
        member.exit()
    rig.settle()
    assert not rig.hierarchy.held.by_tenant


# what tenants share ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 70), st.integers(1, 300), st.lists(st.integers(1, 69), min_size=1, max_size=20))
def test_each_tenant_gets_its_share_however_greedy_the_others_are(tenants: int, most: int, comers: list[int]) -> None:
    taken: Counter[str] = Counter()
    for name in {str(n) for n in comers if n < tenants}:
        while Shares(tenants).has_room(most, taken, name):
            taken[name] += 1
    assert taken.total() <= most
    for _ in range(most // (2 * tenants)):
        assert Shares(tenants).has_room(most, taken, "0")
        taken["0"] += 1
    assert Shares(1).has_room(most, {}, "0", most) and not Shares(1).has_room(most, {}, "0", most + 1)


def test_no_tenant_takes_all_places_for_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_SESSIONS", 8)
    rig = Rig(8 * SLAB, seed=1, tenants=2)
    greedy = [FakeEngine(rig, name=f"e{n}", tenant="a") for n in range(8)]
    assert sum(engine.live for engine in greedy) == 6
    assert all(FakeEngine(rig, name=f"e{n}", tenant="b").live for n in range(2))
    assert not FakeEngine(rig, name="e2", tenant="b").live


def test_no_tenant_takes_all_that_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(8 * SLAB, seed=1, tenants=2)
    monkeypatch.setattr(shares, "MAX_HELD", 8 * (32 + OVERHEAD))
    a, b = (FakeEngine(rig, name="e", tenant=tenant) for tenant in ("a", "b"))
    rig.settle()
    for engine, most in ((a, 6), (b, 2)):
        for _ in range(10):
            engine.scheduler.say(m.Ask(engine.number(), 0, 0, chain(1)))
        assert rig.hierarchy.held.by_tenant[engine.tenant] == most * (32 + OVERHEAD)


def test_a_session_that_never_becomes_complete_ends(rig: Rig) -> None:
    hellos = FakeEngine.__new__(FakeEngine)
    hellos.model, hellos.name = FakeEngine(rig, name="complete").model, "engine"
    alone = FakeMember(rig, hellos.worker_hello(0))
    rig.settle()
    assert rig.hierarchy.next_moment == rig.clock.now() + registry.ASSEMBLE_S
    rig.clock.advance(registry.ASSEMBLE_S - 1)
    rig.turns()
    assert not alone.gone
    rig.clock.advance(1)
    rig.turns()
    assert alone.gone
    assert rig.hierarchy.sessions == 1, "who is complete stays"
    assert rig.hierarchy.registry.next_moment is None


# connections ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["admin", "worker"])
def test_who_has_little_to_say_may_send_no_long_message(well: InThread, role: str) -> None:
    peer = Raw(well.path)
    pidfd = os.pidfd_open(os.getpid())
    hello = worker() if role == "worker" else m.Hello(m.PROTOCOL, "admin")
    socket.send_fds(peer.sock, [wire.frame(hello)], [pidfd])
    os.close(pidfd)
    assert isinstance(peer.read(), m.Welcome)
    most = m.MAX_ACKNOWLEDGED if role == "worker" else MAX_HELLO
    peer.sock.sendall((most + 1).to_bytes(4, "little"))
    refused = peer.read()
    assert isinstance(refused, m.Refused) and refused.code == "SW-802"
    assert peer.read() is None
    peer.close()


def _stats(well: InThread) -> dict[str, int | float | str]:
    peer = Raw(well.path)
    peer.send(m.Hello(m.PROTOCOL, "admin"), m.StatsQuery())
    assert isinstance(peer.read(), m.Welcome)
    answer = peer.read()
    peer.close()
    assert isinstance(answer, m.Stats)
    return answer.values


def test_who_is_refused_and_does_not_go_takes_no_place(well: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it might have said nothing."""
    monkeypatch.setattr(server_module, "HELLO_SECONDS", 3600.0)
    monkeypatch.setattr(connection_module, "peer", lambda sock: (1, os.geteuid() + 1, 0))
    strangers = [Raw(well.path) for _ in range(20)]
    for stranger in strangers:
        assert isinstance(stranger.read(), m.Refused)
    monkeypatch.undo()
    eventually(lambda: _stats(well)["connections"] == 1)
    assert _stats(well)["connections_refused"] == 20
    for stranger in strangers:
        stranger.close()


def test_no_tenant_takes_all_places_for_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, guest = os.geteuid(), os.geteuid() + 12345
    well = InThread(tmp_path, guests={guest: "guests"})
    well.hierarchy.shares = Shares(2)
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 8)
    monkeypatch.setattr(connection_module, "peer", lambda sock: (1, guest, guest))
    peers, answers = [Raw(well.path) for _ in range(8)], []
    for peer in peers:
        with contextlib.suppress(BrokenPipeError):  # its refusal may be there already
            peer.send(m.Hello(m.PROTOCOL, "admin"))
        answers.append(type(peer.read()))
    assert answers == [m.Welcome] * 6 + [m.Refused] * 2
    monkeypatch.setattr(connection_module, "peer", lambda sock: (1, ours, ours))
    assert well.users[ours] == DEFAULT_TENANT
    assert _stats(well)["connections_refused"] == 2
    for peer in peers:
        peer.close()
    well.close()


def test_forgotten_commands_keep_no_operator_out(well: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 8)
    monkeypatch.setattr(admin, "MAX_ASKING", 3)
    peers = []
    for _ in range(20):
        peers.append(Raw(well.path))
        peers[-1].send(m.Hello(m.PROTOCOL, "admin"))
        assert isinstance(peers[-1].read(), m.Welcome)
        if len(peers) > 1:
            peers[0].send(m.StatsQuery())
            assert isinstance(peers[0].read(), m.Stats), "one that goes on asking stays"
    assert _stats(well)["connections"] <= 4, "with the one that asks this"
    for peer in peers:
        peer.close()


def test_what_waits_for_all_peers_together_is_bounded(well: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may have its answers waiting, and all of them together no more than there is room for."""
    monkeypatch.setattr(server_module, "_WAITS_A_LOT", 1 << 12)
    monkeypatch.setattr(server_module, "MAX_WAITING", 1 << 16)
    peers = [Raw(well.path) for _ in range(4)]
    for peer in peers:
        peer.sock.setblocking(False)
        peer.sock.sendall(wire.frame(m.Hello(m.PROTOCOL, "admin")))
    cut = 0
    while not cut:
        for peer in peers:
            try:
                peer.sock.send(wire.frame(m.StatsQuery()) * 50)
            except BlockingIOError:
                pass
            except OSError:
                cut += 1
    assert well.thread.is_alive()
    eventually(lambda: int(_stats(well)["connections"]) < 5)
    for peer in peers:
        peer.close()


def test_half_a_message_that_is_never_completed_is_bounded_too(well: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_WAITING", 3 << 20)
    engine = Recorder()
    dial(well.path)(worker(), engine)
    engine.next(m.Welcome)
    flood = Raw(well.path)
    flood.send(scheduler())
    assert isinstance(flood.read(), m.Welcome)
    with pytest.raises(OSError):
        flood.sock.sendall(m.MAX_ASKED.to_bytes(4, "little") + bytes(m.MAX_ASKED - 1))
        flood.sock.settimeout(PATIENCE)
        while flood.sock.recv(1 << 16):
            pass
        raise OSError("the well has closed it")
    assert engine.ended.wait(PATIENCE)
    flood.close()
