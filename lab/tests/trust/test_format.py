"""The format's campaign sees what it looks for: a reader that lets something pass is found out, ours is not."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec
import pytest

from lab.trust import format
from lab.trust.budget import Budget
from lab.trust.format import flips, fuzz, lives, moves, segments, versions
from lab.trust.format.pieces import Piece, Tally, Turn, run_all, shares
from lab.trust.format.wire import talk
from stepwell.block.frame import FrameHeader
from stepwell.codecs.seal import Opened
from stepwell.hierarchy.sessions import sealing
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.protocol import wire
from stepwell.tiers.base import Reading
from stepwell.tiers.disk import layout

TURN = Turn("a test", 7, float("inf"))


def test_a_little_of_each_family_breaks_nothing() -> None:
    tried = [
        flips.some_bits(TURN, 0, 20),
        lives.flips(TURN, 0, True, 2),
        lives.another_home(TURN, 0),
        segments.bits_of_a_file(TURN, 1, 4001),
        versions.frames(TURN, True, 0, 1024),
        versions.tiers(TURN, 0, 40),
        fuzz.headers(TURN, 0, 300),
        fuzz.heads(TURN, 0, 300),
        fuzz.files(TURN, 2, 60),
        fuzz.keyrings(TURN, 0, 60),
        talk.streams(TURN, 0, 300),
        talk.streams(TURN, 1, 300),
    ]
    assert [tally.violations for tally in tried] == [0] * len(tried), [tally.evidence for tally in tried]
    assert all(tally.cases for tally in tried)


def open_to(verdict: Opened) -> Callable[[pytest.MonkeyPatch], None]:
    """A well that takes frames although they do not open."""
    return lambda monkeypatch: monkeypatch.setitem(sealing._READINGS, verdict, Reading.GOOD)


def no_wiping(monkeypatch: pytest.MonkeyPatch) -> None:
    incoming = Sealing.incoming

    def kept(self: Sealing, entry: object) -> object:
        made = incoming(self, entry)  # type: ignore[arg-type]
        return type(made)(made.id, made.parts, made.open)

    monkeypatch.setattr(Sealing, "incoming", kept)


def no_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zlib.crc32", lambda data: 0)


def any_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_VERSIONS", range(1 << 16))


def a_header_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(page: bytes) -> None:
        raise OverflowError("a number is too large")

    monkeypatch.setattr(FrameHeader, "parse", parse)


def a_header_that_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = FrameHeader.parse
    monkeypatch.setattr(FrameHeader, "parse", lambda page: (bytes(8 << 20), parse(page))[1])


def nothing_undecodable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_UNDECODABLE", (msgspec.ValidationError,))


@pytest.mark.parametrize(
    ("fault", "piece"),
    [
        (open_to(Opened.DAMAGED), lambda: flips.some_bits(TURN, 0, 50)),
        (open_to(Opened.DAMAGED), lambda: moves.every_splice(Turn("short", 7, 0.0), True)),
        (open_to(Opened.FOREIGN), lambda: moves.every_pair(TURN, True, 0, 97)),
        (open_to(Opened.STALE), lambda: moves.every_pair(TURN, False, 1, 97)),
        (open_to(Opened.DAMAGED), lambda: lives.flips(TURN, 0, True, 12)),
        (no_wiping, lambda: flips.some_bits(TURN, 0, 50)),
        (no_checksums, lambda: segments.every_bit(TURN, 0)),
        (any_version, lambda: versions.tiers(TURN, 2, 40)),
        (a_header_that_raises, lambda: fuzz.headers(TURN, 0, 50)),
        (a_header_that_takes_memory, lambda: fuzz.headers(TURN, 0, 50)),
        (nothing_undecodable, lambda: talk.streams(TURN, 0, 300)),
    ],
    ids=["flip", "splice", "foreign", "stale", "file", "slots", "checksums", "version", "raise", "memory", "talk"],
)
def test_a_reader_that_lets_it_pass_is_found_out(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None], piece: Callable[[], Tally]
) -> None:
    fault(monkeypatch)
    tally = piece()
    assert tally.violations > 0
    assert tally.evidence


def test_seeds_repeat() -> None:
    assert [Turn("a", 1, 0).dice().random() for _ in range(2)] == [Turn("a", 1, 0).dice().random()] * 2
    assert len({Turn(name, seed, 0).dice().random() for name in "ab" for seed in (1, 2)}) == 4


def test_parts_make_up_the_whole() -> None:
    assert list(shares(25, 10)) == [(0, 10), (1, 10), (2, 5)]
    assert list(shares(0, 10)) == []


def _counts(turn: Turn, number: int) -> Tally:
    return Tally(cases=number, right=1)


def _raises(turn: Turn, number: int) -> Tally:
    raise LookupError(f"piece {number}")


def _dies(turn: Turn, number: int) -> Tally:
    os._exit(3)


def test_pieces_are_added_up_and_what_goes_wrong_in_one_is_a_violation() -> None:
    budget = Budget(7, tell=lambda text: None)
    tallies = run_all([*[Piece("sum", _counts, (n,)) for n in (2, 3)], Piece("raise", _raises, (5,))], budget)
    assert (tallies["sum"].cases, tallies["sum"].right, tallies["sum"].violations) == (5, 2, 0)
    assert tallies["raise"].violations == 1
    assert "LookupError: piece 5" in tallies["raise"].evidence[0]
    assert run_all([Piece("die", _dies, (1,))], budget)["die"].violations == 1


def test_all_sizes_are_those_of_the_plan() -> None:
    """10^6 fuzzed headers and messages, at least 64 frames bit by bit; and more of everything at full scale."""
    small, full = ([*format._pieces(Budget(7, scale, tell=print))] for scale in (None, 1.0))
    drawn = (fuzz.headers, fuzz.heads, fuzz.files, fuzz.keyrings, talk.streams)
    for pieces, least in ((small, 1_000_000), (full, 10_000_000)):
        assert sum(int(piece.arguments[-1]) for piece in pieces if piece.call in drawn) >= least
    assert sum(piece.call is flips.every_bit for piece in small) >= 64
    assert len(full) > len(small)
    assert len({piece.name for piece in full}) == len(full), "each has dice of its own"
