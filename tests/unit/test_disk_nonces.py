"""No nonce comes twice under one key, whatever happens to the tier that frames are sealed for."""

from __future__ import annotations

import errno
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from disks import PER_SEGMENT, Life, failure

import golden
from stepwell.block.frame import CHUNK, frame_parts
from stepwell.block.layout import SlabLayout
from stepwell.codecs import seal
from stepwell.hierarchy.arena.records import Entry, Owner, Slab
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.io.memory import SystemMemory
from stepwell.tiers.base import Place, Reading


@dataclass
class Used:
    """Key and nonce of every chunk that was sealed, in order. Looked at afterwards: what an executor's job raises is
    an I/O error to a tier and no test's failure."""

    chunks: list[tuple[bytes, bytes]] = field(default_factory=list)

    @property
    def ordinals(self) -> list[tuple[bytes, bytes]]:
        """Without the random part, which would hide what comes twice."""
        return [(key, nonce[4:]) for key, nonce in self.chunks]

    @property
    def keys(self) -> set[bytes]:
        return {key for key, _ in self.chunks}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Used:
    record = Used()

    class Spied:
        def __init__(self, key: bytes) -> None:
            self._key, self._inner = bytes(key), AESGCM(key)

        def encrypt_into(self, nonce: bytes, *rest: Any) -> Any:
            record.chunks.append((self._key, bytes(nonce)))
            return self._inner.encrypt_into(nonce, *rest)

        def encrypt(self, nonce: bytes, *rest: Any) -> Any:
            record.chunks.append((self._key, bytes(nonce)))
            return self._inner.encrypt(nonce, *rest)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    monkeypatch.setattr(seal, "AESGCM", Spied)
    return record


def test_no_nonce_comes_twice_in_several_lives_of_a_tier_that_fails_and_is_killed(tmp_path: Path, used: Used) -> None:
    lives = reinserted = stored = 0
    seen, failures = Counter[str](), Counter[str]()
    made: set[str] = set()
    for seed in range(2):
        folder, draw, number = tmp_path / str(seed), random.Random(seed), 0
        folder.mkdir()
        for turn in range(3):
            life = Life(folder, seed=10 * seed + turn)
            lives += 1

            def fault(operation: str, name: str, offset: int) -> None:
                seen[operation] += 1
                if operation == "create":
                    made.add(name)
                if seen[operation] % {"write": 29, "read": 97}.get(operation, 1 << 30) == 0:
                    failures[operation] += 1
                    raise failure(errno.EIO)

            life.files[0].fault = fault
            for _ in range(34 if turn == 0 else 14):
                life.put(*range(number, number + 8))
                number += 8
                for _ in range(3):  # some blocks are hot
                    life.get(draw.randrange(max(0, number - 3 * PER_SEGMENT), number))
                life.clock.advance(400)
            reinserted += life.tier.counts.reinserted_blocks
            life.files[0].heal()
            stored += life.tier.figures()["blocks"]
            if turn == 1:
                life.end()
                continue
            for _ in range(3):  # writes and an eviction are under way
                life.write(*range(number, number + 8))
                number += 8
            for _ in range(4 + seed):
                life.executor.step()
            life.kill()
    ordinals = used.ordinals
    assert len(ordinals) == len(set(ordinals)), "each number is used once under a key, for one chunk"
    assert len(used.chunks) == len(set(used.chunks))
    assert len(used.chunks) > 1000
    assert len(used.keys) > 2 * len(made) > 8, "files had several lives, each with a key of its own"
    assert lives == 6 and reinserted > 5 and stored > 500
    assert failures["read"] > 2 and failures["write"] > 2


def a_block(payloads: int, nbytes: int) -> Entry:
    """A block of so many shards, as the arena holds it."""
    layout = SlabLayout(nbytes, payloads)
    slab = Slab(1, Owner("default", b"m" * 32, nbytes), layout, SystemMemory().make(layout.nbytes))
    entry = Entry(golden.ORIGIN.name(golden.digest(0)), tuple((slab, n) for n in range(payloads)), None)
    entry.origin = golden.ORIGIN
    return entry


@pytest.mark.parametrize("remade", [False, True], ids=["written", "written again"])
def test_the_chunks_of_a_block_have_the_numbers_of_its_place_one_after_the_other(used: Used, remade: bool) -> None:
    """Two shards of three chunks each: as many numbers as the block has parts, which is what a tier reserves."""
    sealing = Sealing(golden.KEYRING, sealed=True, wall=lambda: golden.NOW)
    entry = a_block(2, 2 * CHUNK + 100)
    outgoing = sealing.outgoing(entry)
    assert len(outgoing.parts) == 2 * len(frame_parts(2 * CHUNK + 100)) == 6
    frames, at, first = np.empty(outgoing.nbytes, np.uint8), 0, 1000
    for part, nbytes in enumerate(outgoing.parts):
        outgoing.make(part, frames[at : at + nbytes], Place(b"a" * 16, first))
        at += nbytes
    if remade:
        used.chunks.clear()
        first = 77
        made = sealing.remake(frames, b"a" * 16, np.empty_like(frames), Place(b"b" * 16, first))
        assert made is Reading.GOOD
    assert [int.from_bytes(number, "big") for _, number in used.ordinals] == list(range(first, first + 6))
    assert len(used.keys) == 1


def test_each_frame_has_a_random_part_in_its_nonces(used: Used, tmp_path: Path) -> None:
    """Beside the number, which alone is unique: should a segment's id and numbers ever come again, nonces do not."""
    life = Life(tmp_path)
    life.put_all(range(200))
    life.end()
    salts = [nonce[:4] for _, nonce in used.chunks]
    assert len(salts) == 400
    assert len(set(salts)) > 390
