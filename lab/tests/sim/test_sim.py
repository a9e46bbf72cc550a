"""The deterministic simulation: it replays, it walks without finding anything, and it finds what is planted."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from lab.sim.disk import Disk
from lab.sim.fibres import Fibres, Killed
from lab.sim.life import Surroundings
from lab.sim.oracle import Oracle, Violation, content
from lab.sim.walk import Walked, walk
from stepwell.client import streams
from stepwell.client.patience import Patience
from stepwell.client.scheduler import SchedulerClient
from stepwell.codecs import seal
from stepwell.codecs.seal import Opened, Opener
from stepwell.hierarchy.arena.arena import Arena
from stepwell.hierarchy.arena.records import Slab
from stepwell.hierarchy.arena.retired import Retired
from stepwell.hierarchy.levels import prefetch
from stepwell.hierarchy.levels.prefetch import Guess, Prefetch
from stepwell.hierarchy.levels.reads import ReadQueue
from stepwell.hierarchy.pauses import Pauses
from stepwell.hierarchy.requests.pins import Pins
from stepwell.hierarchy.requests.recalls import Recalls
from stepwell.hierarchy.requests.spills import Spills
from stepwell.hierarchy.requests.transfers import Transfers
from stepwell.hierarchy.requests.waiting import Waiting
from stepwell.hierarchy.saved import KINDS
from stepwell.hierarchy.sessions.registry import SessionRegistry
from stepwell.hierarchy.sessions.session import Fill, RecallStream, Session
from stepwell.io.files import File
from stepwell.io.staging import Staging
from stepwell.policies.prefetch import record, rhythm
from stepwell.protocol.messages import Landed
from stepwell.tiers.base import Forgotten, Reading
from stepwell.tiers.disk import recovery
from stepwell.tiers.disk.directory.directory import DiskDirectory
from stepwell.tiers.disk.directory.space import Space
from stepwell.tiers.disk.directory.sweep import Sweep
from stepwell.tiers.disk.layout import RECORD, Footer
from stepwell.tiers.disk.tier import DiskTier

MOST_WALKS = 24
"""Of a kind: what half of them do not reach is reached by one of so many."""


def test_a_seed_does_the_same_twice() -> None:
    first, again = walk(12, 800), walk(12, 800)
    assert first.digest == again.digest
    assert first.events > 1000
    assert first == again
    assert walk(13, 800).digest != first.digest


def test_a_seed_does_the_same_in_any_process() -> None:
    said = set()
    for hashes in ("0", "1"):
        command = [sys.executable, "-m", "lab.sim", "--seed", "21", "--steps", "500", "--cuts", "40"]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONHASHSEED": hashes}, capture_output=True, text=True, check=True
        )
        said.add(done.stdout)
    assert len(said) == 1


def test_walks() -> None:
    """New ones each time: a few of the campaign's, so that what breaks a promise often is seen at once."""
    wanted = ("kills", "power cuts", "exits", "lost connections", "ended: recalled", "found after a kill")
    walks = (walk(seed, 2000) for seed in _seeds(MOST_WALKS))
    seen = _sum(walks, 4, lambda seen: all(seen.get(what) for what in wanted))
    assert all(seen.get(what) for what in wanted), f"the walks do not reach enough: {seen}"


@pytest.mark.parametrize("write", ["back", "second_touch"])
def test_walks_of_wells_that_do_not_write_through(write: str) -> None:
    seen = _sum(walk(seed, 1500, write=write) for seed in _seeds(2))
    assert seen["came to the end"] == 2


def test_walks_of_wells_that_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """With less of a rhythm than any walk has, and never discouraged."""
    monkeypatch.setattr(rhythm, "MAX_DEVIATION", 100.0)
    monkeypatch.setattr(rhythm, "MIN_TIMES", 1)
    monkeypatch.setattr(record, "MIN_RIGHT", 0.0)
    monkeypatch.setattr(prefetch, "HOST_SHARE", 2)
    brought: list[int] = []
    step = Prefetch._step

    def counted(self: Prefetch, guess: Guess, *arguments: Any) -> Any:
        entry = step(self, guess, *arguments)
        brought.append(len(guess.promoted))
        return entry

    monkeypatch.setattr(Prefetch, "_step", counted)
    walks = (walk(seed, 1500, prefetch=True) for seed in _seeds(MOST_WALKS))
    seen = _sum(walks, 3, lambda seen: any(brought))
    assert seen["came to the end"] >= 3
    assert any(brought)


@pytest.mark.nightly
def test_walks_in_which_a_tier_hangs_beside_traffic() -> None:
    """Requests whose blocks are in host memory come all the time and keep none of the others waiting."""
    seen = _sum(walk(seed, 1500, traffic=True) for seed in _seeds(3))
    assert seen["hung beside traffic"] > 0 and seen["new weights"] > 0
    assert seen["ended: recalled"] > 0


def test_two_levels_in_foul_weather() -> None:
    walks = (walk(seed, 1500, remote=True) for seed in _seeds(3))
    seen = _sum(walks)
    assert all(seen[f"remote: {what}"] for what in ("vanished", "appeared"))
    assert sum(seen[f"remote: {what}"] for what in ("fail", "flip", "swap", "lose", "hang")) > 3


@pytest.mark.nightly
@pytest.mark.parametrize("write", ["through", "back", "second_touch"])
def test_walks_of_wells_that_are_paused_and_resumed(write: str) -> None:
    """Nothing that is paused begins, nobody waits for it, it outlives the well, and in the end all is as ever."""
    seen = _sum(walk(seed, 1500, write=write, pauses=True) for seed in _seeds(3))
    assert seen["came to the end"] == 3
    assert seen["ended: paused"] and seen["paused spills"] and seen["ended: recalled"]


@pytest.mark.nightly
def test_states_after_power_cuts() -> None:
    walked = [walk(seed, 800, cuts=60) for seed in _seeds(4)]
    _sum(iter(walked))
    assert sum(each.states for each in walked) > 60
    assert sum(each.right for each in walked) > 100


def _seeds(count: int) -> list[int]:
    seeds = [random.randrange(1 << 32) for _ in range(count)]
    print("seeds", seeds)
    return seeds


def _sum(
    walks: Iterator[Walked], least: int = MOST_WALKS, enough: Callable[[dict[str, int]], bool] = lambda seen: True
) -> dict[str, int]:
    """What these walks have seen; after the `least` of them no more are made once that is enough."""
    seen: dict[str, int] = {}
    for number, walked in enumerate(walks, 1):
        assert walked.violation is None, f"seed {walked.seed}: {walked.violation}"
        for what, times in walked.seen.items():
            seen[what] = seen.get(what, 0) + times
        if number >= least and enough(seen):
            break
    return seen


# what is planted is found ---------------------------------------------------------------------------------------------


def _finds(
    *promises: str,
    first: int = 0,
    walks: int = 200,
    steps: int = 1500,
    cuts: int = 0,
    traffic: bool = False,
    pauses: bool = False,
    groups: bool = False,
) -> Violation:
    """Some walk of so many breaks one of these promises. `first`: a seed shortly before one that does: saves time."""
    for seed in range(first, first + walks):
        violation = walk(seed, steps, cuts=cuts, traffic=traffic, pauses=pauses, groups=groups).violation
        if violation is not None:
            assert violation.promise in promises, violation
            print("found by seed", seed)
            return violation
    raise AssertionError(f"{walks} walks have not noticed it")


@pytest.mark.nightly
def test_frames_that_open_as_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    examine = Opener._examine

    def believes(self: Opener, page: bytes) -> Opened:
        """Whatever the header says is what was expected."""
        header = seal.FrameHeader.parse(page)
        if header is not None and header.payload == self._expected.payload:
            names = (header.segment, header.block, header.namespace, header.shard, header.shards, header.payload)
            self._expected = seal.ExpectedFrame(*names)
        return examine(self, page)

    monkeypatch.setattr(Opener, "_examine", believes)
    assert "came back as" in _finds("wrong", first=33).what


def test_a_tag_that_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    opens = Opener.open

    def believes(self: Opener, part: int, frame: Any, into: Any) -> Opened:
        opened = opens(self, part, frame, into)
        return Opened.GOOD if opened is Opened.DAMAGED and self._header is not None else opened

    monkeypatch.setattr(Opener, "open", believes)
    _finds("wrong", steps=800, cuts=100)


@pytest.mark.nightly
def test_a_block_that_is_published_before_all_ranks_have_written_it(monkeypatch: pytest.MonkeyPatch) -> None:
    filled = Spills.filled

    def hasty(self: Spills, session: Session, rank: int, leases: list[int], dropped: list[int]) -> bool:
        for lease in leases:
            if lease in session.fills:
                session.fills[lease] = Fill(session.fills[lease].entry, {rank})
        return filled(self, session, rank, leases, dropped)

    monkeypatch.setattr(Spills, "filled", hasty)
    _finds("wrong", "books")  # whichever comes first: bytes, or slots that somebody else has


def test_a_block_that_has_landed_before_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read = DiskTier.read

    def hasty(self: DiskTier, blocks: Any, done: Callable[[Any], None]) -> None:
        read(self, blocks, lambda answers: done([Reading.GOOD] * len(answers)))

    monkeypatch.setattr(DiskTier, "read", hasty)
    _finds("wrong")


def test_a_lease_that_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(self: Recalls, session: Session, rank: int, transfers: list[int]) -> tuple[()]:
        for number in transfers:
            session.transfers.pop(number, None)
        return ()

    monkeypatch.setattr(Transfers, "ended", forgets)
    _finds("books")


@pytest.mark.nightly
def test_a_stream_whose_leases_end_when_the_first_rank_has_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecallStream, "done", property(lambda self: max(self.copied.values())))
    assert "given away" in _finds("books").what


def test_a_stream_whose_pins_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pins, "free", lambda self, request, blocks: None)
    assert "waits for nothing" in _finds("hits").what


def test_a_stream_of_which_blocks_are_told_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    announce = Transfers.announce

    def stutters(self: Transfers, session: Session, landed: Landed) -> None:
        announce(self, session, landed)
        announce(self, session, landed)

    monkeypatch.setattr(Transfers, "announce", stutters)
    _finds("books", "wrong")


@pytest.mark.nightly
def test_slots_of_a_zombie_that_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = SessionRegistry.leave

    def trusts(self: SessionRegistry, session: Session) -> None:
        quarantine = leave(self, session)
        if quarantine is not None:
            self.quarantines.remove(quarantine)

    monkeypatch.setattr(SessionRegistry, "leave", trusts)
    assert "given away" in _finds("books").what


def test_slabs_that_a_process_keeps_and_nobody_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    part_with = Retired.part_with

    def trusts(self: Retired, slab: Slab) -> None:
        slab.keepers.clear()
        part_with(self, slab)

    monkeypatch.setattr(Retired, "part_with", trusts)
    assert "slabs of" in _finds("books").what


def test_a_client_without_an_end_to_its_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Patience, "over", lambda *arguments, **more: False)
    _finds("late")


def test_a_stream_without_an_end_to_its_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams.Stream, "over", property(lambda self: "" if self._inbox.more else self._inbox.reason))
    assert "stream" in _finds("late").what


@pytest.mark.nightly
def test_a_wait_that_whatever_others_get_renews(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's rule until a tier that hung beside hits in host memory was tried."""

    def anyone(self: SchedulerClient) -> None:
        now = self._clock()
        for other in self._asks.values():
            if other.answered:
                other.news, other.turn, other.sharing = now, now, 1 << 20

    monkeypatch.setattr(SchedulerClient, "_room_given", anyone)
    monkeypatch.setattr(Waiting, "no_blocks", lambda self: None)
    assert "moved" in _finds("late", traffic=True).what


def test_an_owner_of_which_nothing_is_left_but_a_place_in_the_books(monkeypatch: pytest.MonkeyPatch) -> None:
    """As until engines with new weights came and went in a walk."""
    monkeypatch.setattr(Arena, "leave_if_over", lambda self, owner: None)
    assert "neither engines nor slabs" in _finds("books", traffic=True).what


@pytest.mark.parametrize("kind", KINDS)
def test_a_switch_that_switches_nothing_off(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(Pauses, kind, False)
    _finds("paused", "late", pauses=True)


@pytest.mark.nightly
def test_a_pause_that_leaves_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recalls, "pause", lambda self, sessions: iter(()))
    assert "recalls are paused" in _finds("late", pauses=True).what


def test_a_pause_that_the_next_life_has_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Surroundings, "save_paused", lambda self, paused: None)
    assert "should be paused" in _finds("paused", pauses=True).what


@pytest.mark.nightly
def test_a_clear_that_leaves_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(self: DiskDirectory, done: Callable[[Forgotten], None], namespace: bytes = b"") -> None:
        for number in list(self.segments):
            self.shared.index.drop_segment(number)
        self.shared.executor.submit(lambda: None, lambda _: done(Forgotten()))

    monkeypatch.setattr(DiskDirectory, "clear", forgets)
    assert "was cleared" in _finds("wrong").what


def test_a_tier_that_finds_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def recover(self: DiskTier, done: Callable[[int], None]) -> None:
        for directory in self._directories:
            directory.known(unreadable=False)
        done(0)

    monkeypatch.setattr(DiskTier, "recover", recover)
    _finds("warm", "books", steps=300)


@pytest.mark.nightly
def test_a_clear_that_does_not_sync_what_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier life of a file comes back with a power cut: found once, and mended."""

    def ends(self: Sweep, clear: Any) -> None:
        self._clears.remove(clear)
        self._end(clear)

    monkeypatch.setattr(Sweep, "_finish", ends)
    assert "was cleared" in _finds("wrong", first=1006, cuts=400).what


def test_segments_without_a_footer_in_which_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def scan(file: File, segment: bytes, nbytes: int, staging: Staging) -> tuple[Footer, bool]:
        return Footer(segment, np.array([], RECORD), ()), False

    monkeypatch.setattr(recovery, "_scan", scan)
    assert "after a kill" in _finds("warm", steps=300).what


@pytest.mark.nightly
def test_a_directory_that_is_never_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a well that has itself seen faults can show it."""
    monkeypatch.setattr(Space, "ill", property(lambda self: self._ill_until > 0))
    assert "does not write" in _finds("hits", first=3).what


def test_more_on_a_disk_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Space, "may_take", lambda self, nbytes: self._clock.now() >= self._full_until)
    assert "of at most" in _finds("books").what


@pytest.mark.nightly
def test_a_capacity_that_shrinks_and_is_not_kept_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Space, "over", property(lambda self: False))
    assert "of at most" in _finds("books", first=50).what


@pytest.mark.nightly
def test_space_that_is_reserved_for_others_and_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Space, "reserve", property(lambda self: 0, lambda self, nbytes: None), raising=False)
    assert "leaves others" in _finds("books", first=14).what


def test_files_that_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    takes_in = DiskTier._found

    def forgets(self: DiskTier, directory: DiskDirectory, found: recovery.FoundFile) -> None:
        before = directory.space.used
        takes_in(self, directory, found)
        directory.space.used = before

    monkeypatch.setattr(DiskTier, "_found", forgets)
    _finds("books", steps=300)


@pytest.mark.nightly
def test_pins_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReadQueue, "unwanted", lambda self, entry: self._arena.lease(entry))
    _finds("books")


# its parts ------------------------------------------------------------------------------------------------------------


def test_the_oracle_tells_stale_misplaced_and_torn() -> None:
    oracle = Oracle()
    first, second = oracle.begin((0, 0, b"a" * 32), 1), oracle.begin((0, 0, b"b" * 32), 1)
    bytes_ = content(first.nonce, 0, 4096)
    with pytest.raises(Violation, match="never whole"):
        oracle.judge(first.identity, [bytes_], 0)
    first.sent.add(0)
    oracle.judge(first.identity, [bytes_], 0)
    with pytest.raises(Violation, match="came back as"):
        oracle.judge(second.identity, [bytes_], 0)
    torn = np.concatenate([bytes_[:2048], content(second.nonce, 0, 4096)[2048:]])
    with pytest.raises(Violation, match="differs from word 256"):
        oracle.judge(first.identity, [torn], 0)
    with pytest.raises(Violation, match="fill 0"):
        oracle.judge(first.identity, [np.zeros(4096, np.uint8)], 0)
    first.cleared = 10
    oracle.judge(first.identity, [bytes_], 9)
    with pytest.raises(Violation, match="cleared"):
        oracle.judge(first.identity, [bytes_], 11)


def test_what_is_synced_is_there_after_a_power_cut_and_the_rest_in_any_part() -> None:
    disk, dice = Disk(1 << 20), random.Random(1)
    disk.create("synced", 8192).write(0, b"a" * 8192)
    disk.names["synced"].sync()
    disk.create("gone", 4096)
    disk.sync()
    disk.names["synced"].write(4096, b"b" * 4096)
    disk.create("new", 8192).write(0, b"c" * 4096)
    disk.names["new"].write(4096, b"d" * 4096)
    disk.unlink("gone")
    states = [disk.after_power_cut(dice) for _ in range(400)]
    assert all(bytes(state.names["synced"].data[:4096]) == b"a" * 4096 for state in states)
    ends = {bytes(state.names["synced"].data[4096:]) for state in states}
    assert {b"a" * 4096, b"b" * 4096} < ends, "kept, lost and torn"
    assert {state.names.keys() & {"new", "gone"} == set() for state in states} == {True, False}
    assert any("gone" in state.names for state in states), "an unlinked file is back"
    news = [bytes(state.names["new"].data) for state in states if "new" in state.names]
    assert b"" in news, "a name without a length"
    assert bytes(4096) + b"d" * 4096 in news, "a later write without an earlier one"
    assert bytes(8192) in news, "a file without its data"


def test_jobs_stand_still_in_the_middle_and_die_there() -> None:
    fibres = Fibres(random.Random(3))
    fibres.halting = 1.0
    did: list[str] = []

    def job(name: str) -> Callable[[], None]:
        def run() -> None:
            did.append(f"{name} begins")
            try:
                fibres.pause()
            except Killed:
                did.append(f"{name} dies")
                raise
            did.append(f"{name} ends")

        return run

    for name in "abc":
        fibres.submit(job(name), lambda error: did.append(str(error)))
    while (began := sum(each.endswith("begins") for each in did)) < 2:
        fibres.step()
    fibres.kill()
    assert not fibres.step()
    assert sum(each.endswith(("ends", "dies")) for each in did) == began
    assert any(each.endswith("dies") for each in did)
    fibres.close()
