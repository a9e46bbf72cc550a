"""Wells and engines that are killed at random moments: what is recalled is right or a miss, nothing is left.

What the campaign `kills` tries in CI too, with more cases, is tried here by night alone; by day, that it would see."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from lab.rig.well import until
from lab.trust.kills import engines, wells
from lab.trust.kills.engine import Chain, Engine
from lab.trust.kills.ground import ground
from lab.trust.kills.lanes import Tally
from lab.trust.kills.processes import PATIENCE_S, ForkServer
from lab.trust.kills.work import HELD, joined, recall, stats

from .seeds import budget, clean

pytestmark = pytest.mark.kernel


@pytest.mark.nightly
def test_wells_are_killed_at_any_moment() -> None:
    for _ in range(4):  # where this machine dallies, all of 20 lives may end before anything of theirs is on disk
        tally = clean(wells.by_fork(budget(), 0, 20))
        assert tally.n["kills"] == 20
        if tally.n["staged"] and tally.n["kept"]:
            break
    assert tally.n["staged"] and tally.n["kept"], "lives came to store blocks, and the next ones had them"


FORGETFUL = """
from stepwell.tiers.disk import tier

class Few:  # one block of each segment is not found again
    def __init__(self, index): self.index = index
    def __getattr__(self, name): return getattr(self.index, name)
    def __len__(self): return len(self.index)
    def put_many(self, ids, number, pages): self.index.put_many(ids[1:], number, pages[1:])

begin = tier._Recovery.begin
def wrapped(self):
    self._tier._index = Few(self._tier._index)
    begin(self)
tier._Recovery.begin = wrapped
"""


def test_one_block_that_is_not_found_again_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(FORGETFUL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(wells, "_FOUND_S", 0.5)
    monkeypatch.setattr(wells, "STAGES", {"told": 1.0})
    tally = wells.by_fork(budget(), 0, 8)
    assert tally.n["heirs"] and tally.n["cold"]


@pytest.mark.nightly
def test_wells_of_a_fresh_interpreter_are_killed_at_any_moment() -> None:
    tally = wells.by_exec(budget(), 0, 2)  # both may be killed before they keep anything
    assert (tally.n["kills"], dict(tally.evidence)) == (2, {})


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["copy", "haunt"])
def test_engines_are_killed_in_their_copies_and_as_zombies(how: str) -> None:
    with ground() as place, ForkServer(place) as server, ForkServer(place) as victims:
        life = server.well(place.home, {"host": "64MiB"})
        with Engine(place.home, engines.MODEL, engines.SHARD_BYTES) as engine:
            assert life.ready() and joined(engine, life)
            beside = engines.Beside(place, engine, victims, budget().dice(how))
            kills = 0
            while kills < 2 or (how == "copy" and kills < 20 and not beside.tally.n["theirs"]):
                beside.one(how)  # how far it had come when it was killed is chance
                kills += 1
        tally = clean(beside.tally)
        assert tally.n["haunts"] == kills * (how == "haunt")
        assert how == "haunt" or tally.n["theirs"], "what a killed engine had filled is there"


def test_an_engine_that_leaves_right_after_its_copy_holds_nothing() -> None:
    """Its process goes on: what it has acknowledged by one socket counts, though the other's end is seen first."""
    with ground() as place, ForkServer(place) as server:
        life = server.well(place.home, {"host": "64MiB"})
        chain = Chain(1, 4)
        with Engine(place.home, "one", 4096) as engine:
            assert life.ready() and joined(engine, life, PATIENCE_S)
            assert engine.spill(chain) == 4
        for _ in range(25):
            with Engine(place.home, "one", 4096, lambda: life.kill(signal.SIGSTOP)) as engine:
                assert joined(engine, life, PATIENCE_S)
                assert recall(engine, chain, Tally()) == 4
            life.kill(signal.SIGCONT)
        assert until(lambda: not any(stats(place.home)[name] for name in ("sessions", *HELD)), 5.0)


def test_a_wrong_block_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: a block that is not what its identity says is counted."""
    with ground() as place, ForkServer(place) as server:
        life = server.well(place.home, {"host": "64MiB"})
        with Engine(place.home, "one", 4096) as engine:
            assert life.ready() and joined(engine, life, PATIENCE_S)
            chain, tally = Chain(1, 4), Tally()
            assert engine.spill(chain) == 4
            assert recall(engine, chain, tally) == 4
            monkeypatch.setattr(
                "lab.trust.kills.engine.content", lambda model, digest, nbytes: np.zeros(nbytes, np.uint8)
            )
            assert recall(engine, chain, tally) == 0
            assert tally.n["wrong"] == 4 and tally.evidence["wrong"]
