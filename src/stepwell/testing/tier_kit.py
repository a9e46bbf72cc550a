"""The contract of `Tier` as tests: subclass `TierKit`, supply `make`, and pytest runs them on your tier.

    class TestMyTier(TierKit):
        def make(self) -> Tier:
            return MyTier(limit=self.LIMIT)

A tier that keeps frames over a restart also overrides `reopen`; one that keeps nothing sets `keeps = False`.
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator

import pytest

from stepwell.tiers.base import MAX_KEY, Capacity, FrameKey, Hit, Miss, MissReason, Refused, RefusedReason, Stored, Tier


def key(n: int) -> FrameKey:
    return FrameKey(n.to_bytes(36, "big"))


class TierKit(ABC):
    LIMIT = 1 << 20
    """Bytes of frames that the tier made by `make` may hold (more is fine, as `capacity` then says)."""

    FRAME = 8192
    keeps = True

    @abstractmethod
    def make(self) -> Tier:
        """A new, empty tier."""

    def reopen(self, tier: Tier) -> Tier | None:
        """Another life of the same tier after `close`; None if it keeps nothing over a restart."""
        return None

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        tier = self.make()
        yield tier
        tier.close()

    def frame(self, seed: int, nbytes: int = 0) -> bytes:
        return random.Random(seed).randbytes(nbytes or self.FRAME)

    def read(self, tier: Tier, n: int) -> bytes | None:
        buffer = bytearray(b"\xaa" * (self.FRAME + 64))
        answer = tier.read(key(n), memoryview(buffer))
        return bytes(buffer[: answer.nbytes]) if isinstance(answer, Hit) else None

    def test_an_empty_tier_misses(self, tier: Tier) -> None:
        assert tier.lookup([key(1), key(2)]) == [Miss(MissReason.ABSENT)] * 2
        assert tier.read(key(1), memoryview(bytearray(64))) == Miss(MissReason.ABSENT)
        assert tier.lookup([]) == []
        assert tier.capacity().used == 0

    def test_what_was_written_is_read(self, tier: Tier) -> None:
        frames = {n: self.frame(n, nbytes) for n, nbytes in ((1, 1), (2, 4096), (3, self.FRAME))}
        for n, frame in frames.items():
            answer = tier.write(key(n), memoryview(frame))
            assert answer == Stored() if self.keeps else isinstance(answer, Refused)
        for n, frame in frames.items():
            assert self.read(tier, n) == (frame if self.keeps else None)
            expected = Hit(len(frame)) if self.keeps else Miss(MissReason.ABSENT)
            assert tier.lookup([key(n), key(99)]) == [expected, Miss(MissReason.ABSENT)]

    def test_the_frame_is_copied(self, tier: Tier) -> None:
        mine = bytearray(self.frame(1))
        kept = bytes(mine)
        tier.write(key(1), memoryview(mine))
        mine[:] = bytes(len(mine))
        assert self.read(tier, 1) == (kept if self.keeps else None)

    def test_a_second_write_replaces(self, tier: Tier) -> None:
        tier.write(key(1), memoryview(self.frame(1)))
        tier.write(key(1), memoryview(self.frame(2, 100)))
        assert self.read(tier, 1) == (self.frame(2, 100) if self.keeps else None)

    def test_bytes_behind_the_frame_are_left_alone(self, tier: Tier) -> None:
        tier.write(key(1), memoryview(self.frame(1, 100)))
        buffer = bytearray(b"\xaa" * 200)
        tier.read(key(1), memoryview(buffer))
        assert buffer[100:] == b"\xaa" * 100

    def test_a_buffer_that_is_too_small_is_a_miss(self, tier: Tier) -> None:
        tier.write(key(1), memoryview(self.frame(1)))
        buffer = bytearray(self.FRAME - 1)
        reason = MissReason.DAMAGED if self.keeps else MissReason.ABSENT
        assert tier.read(key(1), memoryview(buffer)) == Miss(reason)

    def test_dropped_is_gone_and_dropping_twice_is_fine(self, tier: Tier) -> None:
        for n in (1, 2):
            tier.write(key(n), memoryview(self.frame(n)))
        tier.drop([key(1), key(7)])
        tier.drop([key(1)])
        assert self.read(tier, 1) is None
        assert tier.lookup([key(1)]) == [Miss(MissReason.ABSENT)]
        assert self.read(tier, 2) == (self.frame(2) if self.keeps else None)

    def test_capacity_holds_at_all_times(self, tier: Tier) -> None:
        limit = tier.capacity().limit
        for n in range(3 * min(limit, self.LIMIT) // self.FRAME):
            tier.write(key(n), memoryview(self.frame(n)))
            now = tier.capacity()
            assert now.limit == limit
            assert 0 <= now.used <= limit
            assert (now.used > 0) is self.keeps
            assert self.read(tier, n) in (self.frame(n), None)

    def test_a_frame_that_never_fits_is_refused(self, tier: Tier) -> None:
        limit = tier.capacity().limit
        if limit > 64 << 20:
            pytest.skip("this tier is too large to write a frame that does not fit")
        assert tier.write(key(1), memoryview(bytes(limit + 1))) == Refused(RefusedReason.TOO_LARGE)
        assert self.read(tier, 1) is None
        assert tier.capacity() == Capacity(0, limit)

    @pytest.mark.parametrize("bad", [b"", bytes(MAX_KEY + 1)])
    def test_impossible_keys(self, tier: Tier, bad: bytes) -> None:
        frame_key = FrameKey(bad)
        with pytest.raises(ValueError):
            tier.lookup([key(1), frame_key])
        with pytest.raises(ValueError):
            tier.read(frame_key, memoryview(bytearray(8)))
        with pytest.raises(ValueError):
            tier.write(frame_key, memoryview(b"12345678"))
        with pytest.raises(ValueError):
            tier.drop([frame_key])

    def test_closed(self) -> None:
        tier = self.make()
        tier.close()
        tier.close()
        for call in (
            lambda: tier.lookup([key(1)]),
            lambda: tier.read(key(1), memoryview(bytearray(8))),
            lambda: tier.write(key(1), memoryview(b"12345678")),
            lambda: tier.drop([key(1)]),
            tier.capacity,
            tier.recover,
        ):
            with pytest.raises(ValueError):
                call()

    def test_a_new_tier_has_nothing_to_recover(self, tier: Tier) -> None:
        assert list(tier.recover()) == []

    def test_another_life_recovers_what_can_be_read(self) -> None:
        tier = self.make()
        for n in range(8):
            tier.write(key(n), memoryview(self.frame(n)))
        tier.drop([key(3)])
        tier.close()
        again = self.reopen(tier)
        if again is None:
            pytest.skip("this tier keeps nothing over a restart")
        recovered = list(again.recover())
        assert len(set(recovered)) == len(recovered)
        for n in range(8):
            if key(n) in recovered:
                assert self.read(again, n) == self.frame(n)
        again.close()

    def test_no_reader_sees_a_mixture(self, tier: Tier) -> None:
        """Two threads replace one frame while this one reads it."""
        frames = [bytes([n]) * self.FRAME for n in (1, 2)]
        stop = threading.Event()

        def write(frame: bytes) -> None:
            while not stop.is_set():
                tier.write(key(1), memoryview(frame))

        writers = [threading.Thread(target=write, args=(frame,)) for frame in frames]
        for writer in writers:
            writer.start()
        try:
            seen = {self.read(tier, 1) for _ in range(200)}
        finally:
            stop.set()
            for writer in writers:
                writer.join()
        assert seen <= {*frames, None}
