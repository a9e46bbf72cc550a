"""Format: whatever happens to the bytes of frames, segments, keyrings and messages, what comes out is what went in, for
whom it went in, or nothing.

    flips · lengths · moves     every bit, length and exchange of small frames and segments, in memory
    lives                       the same, by samples, in files between the lives of a disk tier
    versions                    every number of a version that is not ours
    fuzz · talk · sockets       what nobody has written: headers, footers, keyrings, messages, streams into a real well

Frames are made and opened by the code that the well makes and opens them with, under several tenants, keys and
namespaces. Each row is a family; its cases are shared by processes.
"""

from __future__ import annotations

from collections.abc import Iterable

from lab.trust.budget import Budget
from lab.trust.format import flips, fuzz, lives, moves, segments, versions
from lab.trust.format.pieces import Piece, Tally, run_all, shares
from lab.trust.format.wire import sockets, talk
from lab.trust.report import Row

_BITS, _LENGTHS, _MOVES = "a flipped bit of a frame", "frames and segments of any length", "frames in others' places"
_INDEX, _KEYS, _FILES = "a flipped bit of a head or footer", "a flipped or cut keyring", "files changed between lives"
_VERSIONS, _FUZZED = "another version is kept, not guessed", "fuzzed headers, footers, keyrings"
_TALK, _STREAMS = "fuzzed messages, both ways", "byte streams into a real well"

_REMARKS = {
    _BITS: "every bit of frames of at most 2 KiB, again with the header's checksum made right; some of large ones",
    _LENGTHS: "every length from none to a page more, and zeros from any byte on",
    _MOVES: "every pair over blocks, shards, tenants, keys, namespaces, segments, positions; spliced parts and chunks",
    _INDEX: "every bit alone, and by samples in a whole segment, with its page's checksum made right too",
    _KEYS: "every bit and length: refused, never changed",
    _FILES: "a case is a read in a next life: flips, exchanged pages and files, old copies of files and directories",
    _VERSIONS: "all 65,535 others of head, trailer, frame and keyring",
    _FUZZED: "refused, nothing raised, at most 1 MiB allocated for each (4 MiB for a keyring)",
    _TALK: "messages or a ProtocolError, at most 1 MiB and three times its length allocated",
    _STREAMS: "its connection ends with one message, others are answered and find their blocks, nothing is left",
}


def run(budget: Budget) -> Iterable[Row]:
    for family, tally in run_all([*_pieces(budget)], budget).items():
        yield Row(
            f"format: {family}", tally.cases, tally.violations, budget.seed, _remark(family, tally), tally.evidence
        )


def _remark(family: str, tally: Tally) -> str:
    accepted = f"; {tally.right:,} times something was accepted, and it was right" if tally.right else ""
    return _REMARKS[family] + accepted + "".join(f"; {note}" for note in tally.notes)


def _pieces(budget: Budget) -> Iterable[Piece]:
    """Long ones first, so that no process is left alone with one at the end."""
    for number, times in shares(budget.of(600, 10_000), 300):
        yield Piece(_STREAMS, sockets.into_a_well, (number, times))
    yield from _of_frames(budget)
    yield from _of_files(budget)
    yield from _of_versions()
    for number, times in shares(budget.of(260_000, 2_600_000), 20_000):
        yield Piece(_FUZZED, fuzz.headers, (number, times))
    for number, times in shares(budget.of(350_000, 3_500_000), 50_000):
        yield Piece(_FUZZED, fuzz.heads, (number, times))
    for number, times in shares(budget.of(10_000, 200_000), 1000):
        yield Piece(_FUZZED, fuzz.files, (number, times))
    for number, times in shares(budget.of(20_000, 200_000), 10_000):
        yield Piece(_FUZZED, fuzz.keyrings, (number, times))
    for number, times in shares(budget.of(400_000, 4_000_000), 25_000):
        yield Piece(_TALK, talk.streams, (number, times))


def _of_frames(budget: Budget) -> Iterable[Piece]:
    for number in range(budget.of(64, 1024)):
        yield Piece(_BITS, flips.every_bit, (number,))
    for number, times in shares(budget.of(4000, 400_000), 1000):
        yield Piece(_BITS, flips.some_bits, (number, times))
    for number in range(budget.of(4, 64)):
        yield Piece(_LENGTHS, flips.every_length, (number,))
    for sealed in (True, False):
        yield Piece(_MOVES, moves.every_splice, (sealed,))
        for first in range(8):
            yield Piece(_MOVES, moves.every_pair, (sealed, first, 8))


def _of_files(budget: Budget) -> Iterable[Piece]:
    for sealed in (True, False):
        for closed in (True, False):
            yield Piece(_LENGTHS, segments.every_length, (closed, sealed))
        for number, times in shares(budget.of(100, 10_000), 100):
            yield Piece(_FILES, lives.flips, (number, sealed, times))
            yield Piece(_FILES, lives.exchanges, (number, sealed, times))
            yield Piece(_FILES, lives.replays, (number, sealed, times))
    for number in range(budget.of(4, 40)):
        yield Piece(_FILES, lives.another_home, (number,))
        yield Piece(_INDEX, segments.every_bit, (number,))
    step = 1 if budget.scale else 11
    for number in range(2):
        yield Piece(_INDEX, segments.bits_of_a_file, (number, step))
    yield Piece(_KEYS, segments.keyring)


def _of_versions() -> Iterable[Piece]:
    for trailers in (False, True):
        yield Piece(_VERSIONS, versions.segments, (trailers,))
    for sealed in (True, False):
        for first in range(8):
            yield Piece(_VERSIONS, versions.frames, (sealed, first, 8))
    for first in range(4):
        yield Piece(_VERSIONS, versions.keyrings, (first, 4))
    for first in range(0, versions.NUMBERS, 4096):
        yield Piece(_VERSIONS, versions.tiers, (first, 4096))
