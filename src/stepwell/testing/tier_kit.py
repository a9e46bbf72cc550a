"""The contract of `Tier` as tests: subclass `TierKit`, supply `make`, and pytest runs them on your tier.

    class TestMyTier(TierKit):
        def make(self, executor: SeededExecutor) -> Tier:
            return MyTier(self.LIMIT, executor)

A tier that keeps blocks over a restart also overrides `reopen`.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
import pytest

from stepwell.block.layout import PAGE
from stepwell.block.namespace import BlockId
from stepwell.io.memory import Bytes
from stepwell.testing.executor import JobFaults, SeededExecutor
from stepwell.tiers.base import Forgotten, Incoming, Outgoing, Place, Reading, Tier, Writing

NAMESPACE, OTHER = b"n" * 16, b"o" * 16


def block_id(n: int) -> BlockId:
    return BlockId(hashlib.blake2b(n.to_bytes(8, "big"), digest_size=32).digest())


def in_parts(nbytes: int) -> tuple[int, ...]:
    """A block's bytes as parts of different sizes, whole pages each."""
    first = nbytes // PAGE // 3 * PAGE
    return (first, nbytes - first) if first else (nbytes,)


def content(seed: int, nbytes: int) -> Bytes:
    return np.frombuffer(random.Random(seed).randbytes(nbytes), np.uint8)


class AnyKeys:
    """A `KeyResolver` of blocks that are not sealed: their bytes are the same in every segment."""

    def knows(self, commitment: bytes, segment: bytes) -> bool:
        return True

    def again(self, commitment: bytes, segment: bytes, other: bytes) -> bytes | None:
        return commitment

    def remake(self, frames: Bytes, segment: bytes, into: Bytes, place: Place) -> Reading:
        into[:] = frames
        return Reading.GOOD


class Hands:
    """Writes and reads blocks of a tier whose executor is ours, and waits for the answers."""

    def __init__(self, tier: Tier, executor: SeededExecutor, nbytes: int) -> None:
        self.tier = tier
        self.executor = executor
        self.nbytes = nbytes

    def outgoing(self, n: int, seed: int | None = None, nbytes: int = 0, namespace: bytes = NAMESPACE) -> Outgoing:
        parts = in_parts(nbytes or self.nbytes)
        data = content(n if seed is None else seed, sum(parts))

        def make(part: int, frame: Bytes, place: Place) -> None:
            at = sum(parts[:part])
            frame[:] = data[at : at + parts[part]]

        return Outgoing(block_id(n), namespace, parts, lambda segment: bytes(32), make)

    def write(self, *numbers: int, seed: int | None = None, namespace: bytes = NAMESPACE) -> list[Writing]:
        return self.put([self.outgoing(n, seed, namespace=namespace) for n in numbers])

    def put(self, blocks: list[Outgoing]) -> list[Writing]:
        answers: list[list[Writing]] = []
        self.tier.write(blocks, answers.append)
        assert not answers, "no completion comes inside the call"
        self.executor.drain()
        (answer,) = answers
        return answer

    def read(self, *numbers: int, nbytes: int = 0) -> list[Bytes | Reading]:
        """The bytes of each block that was found; else why not."""
        found: dict[int, list[Bytes]] = {at: [] for at in range(len(numbers))}

        def incoming(at: int, n: int) -> Incoming:
            def open(part: int, frame: Bytes, segment: bytes) -> Reading:
                assert part == len(found[at]), "parts come in order, once each"
                found[at].append(frame.copy())
                frame[:] = 0xAA  # the buffer belongs to the tier, which may overwrite it
                return Reading.GOOD

            return Incoming(block_id(n), in_parts(nbytes or self.nbytes), open)

        answers: list[list[Reading]] = []
        self.tier.read([incoming(at, n) for at, n in enumerate(numbers)], answers.append)
        assert not answers, "no completion comes inside the call"
        self.executor.drain()
        (answer,) = answers
        return [np.concatenate(found[at]) if each is Reading.GOOD else each for at, each in enumerate(answer)]

    def clear(self, namespace: bytes = b"") -> Forgotten:
        cleared: list[Forgotten] = []
        self.tier.clear(cleared.append, namespace)
        assert not cleared, "no completion comes inside the call"
        self.executor.drain()
        (forgotten,) = cleared
        return forgotten

    def has(self, n: int, seed: int | None = None) -> bool:
        """The block can be read, and is what was written; False if it is not there."""
        (read,) = self.read(n)
        if isinstance(read, Reading):
            return False
        assert (read == content(n if seed is None else seed, self.nbytes)).all()
        return True


class TierKit(ABC):
    LIMIT = 64 << 20
    """Bytes that the tier made by `make` may hold (others are fine, as `capacity` then says)."""

    BLOCK = 128 * PAGE

    @abstractmethod
    def make(self, executor: SeededExecutor) -> Tier:
        """A new, empty tier, recovered already."""

    def reopen(self, tier: Tier, executor: SeededExecutor) -> Tier | None:
        """Another life of the same tier after `settle` and `close`, recovered already; None if it keeps nothing over a
        restart."""
        return None

    @pytest.fixture
    def hands(self) -> Iterator[Hands]:
        executor = SeededExecutor(1)
        tier = self.make(executor)
        yield Hands(tier, executor, self.BLOCK)
        executor.drain()
        tier.close()

    def test_an_empty_tier_has_nothing(self, hands: Hands) -> None:
        assert not hands.tier.lookup(block_id(1))
        assert hands.read(1, 2) == [Reading.ABSENT, Reading.ABSENT]
        assert hands.tier.capacity().used <= hands.tier.capacity().limit

    def test_what_was_written_is_read(self, hands: Hands) -> None:
        assert hands.write(1, 2, 3) == [Writing.STORED] * 3
        assert hands.write(4) == [Writing.STORED]
        assert all(hands.tier.lookup(block_id(n)) for n in (1, 2, 3, 4))
        assert not hands.tier.lookup(block_id(5))
        for n, read in zip((3, 1, 4, 2), hands.read(3, 1, 4, 2), strict=True):
            assert not isinstance(read, Reading)
            assert (read == content(n, self.BLOCK)).all()

    def test_one_call_answers_for_each_block(self, hands: Hands) -> None:
        hands.write(1)
        first, second, third = hands.read(7, 1, 8)
        assert (first, third) == (Reading.ABSENT, Reading.ABSENT)
        assert not isinstance(second, Reading)

    def test_writing_again_is_fine(self, hands: Hands) -> None:
        hands.write(1)
        assert hands.write(1) == [Writing.STORED]
        assert hands.has(1)

    def test_a_block_of_another_length_is_never_good(self, hands: Hands) -> None:
        """The caller knows how long its blocks are; what it opens proves itself."""
        hands.write(1)
        (read,) = hands.read(1, nbytes=64 * self.BLOCK)
        assert isinstance(read, Reading) or not (read[: self.BLOCK] != content(1, self.BLOCK)).any()

    def test_a_damaged_block_is_looked_up_no_more(self, hands: Hands) -> None:
        hands.write(1, 2)
        answers: list[list[Reading]] = []
        failed: list[bool] = []
        wrong = Incoming(
            block_id(1), in_parts(self.BLOCK), lambda part, frame, segment: Reading.DAMAGED, lambda: failed.append(True)
        )
        hands.tier.read([wrong], answers.append)
        hands.executor.drain()
        assert answers == [[Reading.DAMAGED]]
        assert failed == [True]
        assert not hands.tier.lookup(block_id(1))
        assert hands.has(2)

    def test_an_opener_that_raises_is_a_miss(self, hands: Hands) -> None:
        hands.write(1)
        answers: list[list[Reading]] = []

        failed: list[bool] = []

        def raises(part: int, frame: Bytes, segment: bytes) -> Reading:
            raise ValueError("an opener has a bug")

        bad = Incoming(block_id(1), in_parts(self.BLOCK), raises, lambda: failed.append(True))
        hands.tier.read([bad], answers.append)
        hands.executor.drain()
        assert answers == [[Reading.FAILED]]
        assert failed == [True]

    def test_a_maker_that_raises_is_not_stored(self, hands: Hands) -> None:
        def raises(part: int, frame: Bytes, place: Place) -> None:
            raise ValueError("a maker has a bug")

        bad = Outgoing(block_id(1), NAMESPACE, (self.BLOCK,), lambda segment: bytes(32), raises)
        assert hands.put([bad]) == [Writing.FAILED]
        assert not hands.tier.lookup(block_id(1))
        assert hands.write(2) == [Writing.STORED]
        assert hands.has(2)

    def test_dropped_is_gone_and_dropping_twice_is_fine(self, hands: Hands) -> None:
        hands.write(1, 2)
        hands.tier.drop(block_id(1))
        hands.tier.drop(block_id(1))
        assert not hands.has(1)
        assert hands.has(2)

    def test_cleared_is_gone(self, hands: Hands) -> None:
        hands.write(1, 2)
        cleared: list[Forgotten] = []
        hands.tier.clear(cleared.append)
        assert not hands.tier.lookup(block_id(1))
        hands.executor.drain()
        ((blocks, nbytes, whole),) = [(each.blocks, each.nbytes, each.whole) for each in cleared]
        assert (blocks, whole) == (2, True)
        assert nbytes >= 2 * self.BLOCK
        assert hands.read(1, 2) == [Reading.ABSENT, Reading.ABSENT]
        assert hands.write(3) == [Writing.STORED]
        assert hands.has(3)

    def test_one_namespace_is_cleared_and_no_other(self, hands: Hands) -> None:
        hands.write(1, 2)
        hands.write(3, 4, namespace=OTHER)
        hands.write(5)
        assert hands.clear(b"?" * 16) == Forgotten()
        assert hands.clear(NAMESPACE) == Forgotten(3, 3 * self.BLOCK)
        assert [hands.tier.lookup(block_id(n)) for n in range(1, 6)] == [False, False, True, True, False]
        assert hands.read(1, 2, 5) == [Reading.ABSENT] * 3
        assert hands.has(3) and hands.has(4)
        assert hands.write(2, 6) == [Writing.STORED] * 2, "what comes after it stays"
        assert [hands.has(n) for n in range(1, 7)] == [False, True, True, True, False, True]

    @pytest.mark.parametrize("seed", range(8))
    @pytest.mark.parametrize("namespace", [b"", NAMESPACE])
    def test_when_it_is_cleared_nothing_of_before_is_being_read(
        self, hands: Hands, namespace: bytes, seed: int
    ) -> None:
        """Reads may end as they like, and before the clear does."""
        chance = random.Random(seed)
        hands.write(1, 2)
        hands.write(3, 4, namespace=OTHER)
        order: list[str] = []
        got: dict[int, list[Bytes]] = {n: [] for n in (1, 2, 3, 4)}

        def incoming(n: int) -> Incoming:
            def open(part: int, frame: Bytes, segment: bytes) -> Reading:
                got[n].append(frame.copy())
                return Reading.GOOD

            return Incoming(block_id(n), in_parts(self.BLOCK), open)

        def read(n: int) -> None:
            hands.tier.read([incoming(n)], lambda answers: order.append(f"{n} {answers[0].value}"))

        for n in (1, 2, 3, 4):
            read(n)
        for _ in range(chance.randrange(6)):
            hands.executor.step()
        hands.tier.clear(lambda forgotten: order.append("cleared"), namespace)
        hands.executor.drain()
        before = order[: order.index("cleared")]
        gone = {1, 2} if namespace else {1, 2, 3, 4}
        assert {int(each[0]) for each in before} >= gone
        assert all(each.split()[1] in ("good", "absent") for each in order if each != "cleared"), order
        for n in (1, 2, 3, 4):
            if f"{n} good" in order:
                assert (np.concatenate(got[n]) == content(n, self.BLOCK)).all()
        assert all(hands.has(n) for n in {1, 2, 3, 4} - gone)

    @pytest.mark.parametrize("fail", [0.0, 0.4])
    def test_a_call_is_answered_after_its_last_maker_has_run(self, hands: Hands, fail: float) -> None:
        """A caller may reuse a block's memory as soon as the block is answered, refused or not."""
        nbytes = hands.tier.capacity().limit // 12 // PAGE * PAGE
        for call in range(8):
            hands.executor.faults = JobFaults(fail)
            late: list[int] = []
            answers: list[list[Writing]] = []

            def outgoing(n: int, late: list[int] = late, answers: list[list[Writing]] = answers) -> Outgoing:
                def make(part: int, frame: Bytes, place: Place) -> None:
                    late.extend([n] * len(answers))
                    frame[:] = n

                return Outgoing(block_id(n), NAMESPACE, in_parts(nbytes), lambda segment: bytes(32), make)

            hands.tier.write([outgoing(8 * call + n) for n in range(8)], answers.append)
            assert not answers, "no completion comes inside the call"
            hands.executor.drain()
            assert len(answers) == 1
            assert not late
            hands.executor.faults = JobFaults()

    def test_places_are_never_given_twice(self, hands: Hands) -> None:
        seen: list[tuple[bytes, int]] = []

        def make(part: int, frame: Bytes, place: Place) -> None:
            seen.append((place.segment, place.ordinal + part))
            frame[:] = 0

        parts = in_parts(self.BLOCK)
        for n in range(3 * hands.tier.capacity().limit // (4 * self.BLOCK)):
            hands.put([
                Outgoing(block_id(4 * n + k), NAMESPACE, parts, lambda segment: bytes(32), make) for k in range(4)
            ])  # fmt: skip
        assert len(set(seen)) == len(seen)

    def test_capacity_holds_at_all_times(self, hands: Hands) -> None:
        limit = hands.tier.capacity().limit
        for n in range(3 * limit // self.BLOCK):
            answers: list[list[Writing]] = []
            hands.tier.write([hands.outgoing(n)], answers.append)
            while hands.executor.step():
                assert hands.tier.capacity().used <= limit
            assert answers == [[Writing.STORED]]
            assert hands.has(n)

    def test_a_block_that_never_fits_is_refused(self, hands: Hands) -> None:
        nbytes = hands.tier.capacity().limit + PAGE
        assert hands.put([hands.outgoing(1, nbytes=nbytes), hands.outgoing(2)]) == [
            Writing.TOO_LARGE,
            Writing.STORED,
        ]
        assert not hands.tier.lookup(block_id(1))
        assert hands.has(2)

    def test_another_life_finds_what_was_written(self, hands: Hands) -> None:
        for n in range(40):
            hands.write(n)
        settled: list[bool] = []
        hands.tier.settle(lambda: settled.append(True))
        hands.executor.drain()
        assert settled == [True]
        hands.tier.close()
        again = self.reopen(hands.tier, hands.executor)
        if again is None:
            pytest.skip("this tier keeps nothing over a restart")
        hands.tier = again
        assert all(hands.has(n) for n in range(40))

    def test_another_life_finds_nothing_of_what_was_cleared(self, hands: Hands) -> None:
        for n in range(0, 40, 2):
            hands.write(n)
            hands.write(n + 1, namespace=OTHER)
        hands.clear(NAMESPACE)
        hands.write(100)
        hands.tier.settle(lambda: None)
        hands.executor.drain()
        hands.tier.close()
        again = self.reopen(hands.tier, hands.executor)
        if again is None:
            pytest.skip("this tier keeps nothing over a restart")
        hands.tier = again
        assert {n for n in range(101) if hands.has(n)} == {*range(1, 40, 2), 100}

    def test_reads_and_writes_in_any_order(self, hands: Hands) -> None:
        """Calls overlap, jobs run and complete in the executor's disorder: what is read is what was written."""
        chance = random.Random(2)
        written: set[int] = set()
        got: list[tuple[int, int, Bytes]] = []
        parts = in_parts(self.BLOCK)

        def opener(n: int) -> Incoming:
            def open(part: int, frame: Bytes, segment: bytes) -> Reading:
                got.append((n, sum(parts[:part]), frame.copy()))
                return Reading.GOOD

            return Incoming(block_id(n), parts, open)

        for _ in range(300):
            numbers = [chance.randrange(60) for _ in range(chance.randrange(1, 4))]
            if chance.random() < 0.5:
                hands.tier.write([hands.outgoing(n) for n in dict.fromkeys(numbers)], lambda answers: None)
                written.update(numbers)
            else:
                hands.tier.read([opener(n) for n in numbers], lambda answers: None)
            for _ in range(chance.randrange(4)):
                hands.executor.step()
        hands.executor.drain()
        assert got
        for n, at, frame in got:
            assert n in written
            assert (frame == content(n, self.BLOCK)[at : at + len(frame)]).all()
