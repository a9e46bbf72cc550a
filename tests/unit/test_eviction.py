"""The kit on every policy of the catalog, and what makes each of them itself."""

from __future__ import annotations

from string import ascii_uppercase

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_traces import seconds, trace_of

from stepwell.policies.admission.expected import ExpectedValue
from stepwell.policies.catalog import POLICIES
from stepwell.policies.eviction.base import Eviction
from stepwell.policies.eviction.orders.queue import Queue, QueuePlace
from stepwell.policies.eviction.sieve import Sieve
from stepwell.policies.eviction.valued import Valued
from stepwell.policies.reuse import Reuse, class_of
from stepwell.simulate.replay import Replay
from stepwell.testing.eviction_kit import EvictionKit, KitTier, Node


class Named(EvictionKit):
    POLICY = ""

    def make(self) -> Eviction:
        return POLICIES[self.POLICY]().eviction


def kit(policy: str) -> type[Named]:
    return type(f"Test{policy.title().replace('_', '')}", (Named,), {"POLICY": policy})


TestDefault, TestLru, TestLfu, TestArc = (kit(policy) for policy in ("auto", "lru", "lfu", "arc"))
TestS3Fifo, TestSieve, TestLru2, TestGdsf = (kit(policy) for policy in ("s3fifo", "sieve", "lru2", "gdsf"))


# --- queues


@given(st.lists(st.tuples(st.sampled_from(["append", "prepend", "split", "remove"]), st.integers(0, 99))))
def test_a_queue_is_a_list(steps: list[tuple[str, int]]) -> None:
    queue, model = Queue(), list[QueuePlace]()
    for what, n in steps:
        place = QueuePlace(Node(0, 2 + n % 5, None))
        if what == "append":
            queue.append(place)
            model.append(place)
        elif what == "prepend":
            queue.prepend(place)
            model.insert(0, place)
        elif model:
            at = n % len(model)
            if what == "remove":
                queue.remove(model.pop(at))
            elif (whole := model[at].item).size > 1:
                place.item.size = 1
                whole.size -= 1
                queue.split(model[at], place)
                model.insert(at, place)
        forwards = [at := queue.oldest] if queue.oldest else []
        while forwards and (at := forwards[-1].newer) is not None:
            forwards.append(at)
        backwards = [queue.newest] if queue.newest else []
        while backwards and (at := backwards[-1].older) is not None:
            backwards.append(at)
        assert forwards == backwards[::-1] == model
        assert queue.size == sum(place.item.size for place in model)
        assert all(place.queue is queue for place in model)


@pytest.mark.parametrize("policy", ["arc", "s3fifo"])
def test_both_parts_of_what_is_remembered_are(policy: str) -> None:
    tier = KitTier(POLICIES[policy]().eviction, capacity=8)
    node, large = tier.node(size=4), tier.node(size=8)
    tier.ask(node)
    tier.ask(node)
    tier.ask(large)
    tail = tier.split(node, 1)
    assert node.note.queue is tail.note.queue is not None
    assert (node.note.older, tail.note.newer) == (tail.note, node.note)
    tier.forget(node)
    assert tail.note.queue.size == 3


# --- what makes each policy itself. Prompts by their blocks, a letter each; most are one block long


def played(policy: str, capacity: int, *prompts: str) -> list[int]:
    """How many blocks each prompt finds in a tier of so many."""
    return Replay(trace_of(prompts), POLICIES[policy](), capacity, seconds).run().hits.tolist()


def ending(policy: str, capacity: int, *prompts: str, last: int = 1) -> str:
    """The same of the last prompts, as digits."""
    return "".join(map(str, played(policy, capacity, *prompts)[-last:]))


OTHERS = "0123456789" + ascii_uppercase + "éèêëàâäîïôöûüç"
"""Asked for once."""


def test_lru_keeps_what_was_used_last() -> None:
    assert ending("lru", 2, *"abcbca", last=6) == "000110"
    assert ending("lru", 2, *"abcabcabc", last=9) == "000000000", "nothing of a cycle that is longer than the tier"


def test_lfu_keeps_what_is_used_often() -> None:
    assert ending("lfu", 2, *"aaaaa", *"bcbcba") == "1"
    assert ending("lru", 2, *"aaaaa", *"bcbcba") == "0"


def test_lfu_ages() -> None:
    """Fame outlives a few that come and go, not very many."""
    assert ending("lfu", 2, *"aaaaa", *OTHERS[:4], "a") == "1"
    assert ending("lfu", 2, *"aaaaa", *OTHERS[:20], "a") == "0"
    assert ending("lfu", 2, *"aaaaa", *OTHERS[:20], *"bbbbbcb") == "1", "who comes later is not held against it"


def test_gdsf_keeps_what_was_dear() -> None:
    """Late blocks of a long prompt, used once, are worth two uses of a first block, but not five."""
    long = "".join(chr(0x4E00 + at) for at in range(40))
    assert played("gdsf", 42, long, *"xxyyzz", long)[-1] == 40
    assert played("lfu", 42, long, *"xxyyzz", long)[-1] == 39
    assert played("gdsf", 42, long, *"xxxxxyyyyyzzzzz", long)[-1] == 39


def test_lru2_withstands_a_scan() -> None:
    prompts = "abab" + OTHERS[:8] + "ab"
    assert ending("lru2", 3, *prompts, last=2) == "11"
    assert ending("lru", 3, *prompts, last=2) == "00"


def test_lru2_looks_at_the_last_use_but_one() -> None:
    """`a` was used after `b`, but before that `b` was used after `a`."""
    assert ending("lru2", 2, *"abbacb") == "1"
    assert ending("lru2", 2, *"abbaca") == "0"


def test_sieve_has_a_hand_that_goes_on() -> None:
    """What it has spared once is safe until it has been round: LRU forgets `a`, and so would a hand that begins at the
    oldest each time."""
    assert ending("sieve", 3, *"abcadefa") == "1"
    assert ending("lru", 3, *"abcadefa") == "0"
    assert ending("sieve", 3, *"abcadcdea") == "0", "once round, it takes what was not used meanwhile"


def test_the_hand_of_sieve_takes_the_end_of_what_it_points_at() -> None:
    tier = KitTier(Sieve())
    node, other = tier.node(size=4), tier.node()
    tier.ask(node)
    tier.ask(other)
    assert tier.victim() is node
    tail = tier.split(node, 1)
    assert tier.victim() is tail


def test_s3fifo_lets_a_scan_pass_through_its_small_queue() -> None:
    prompts = "abaabb" + OTHERS[:20] + "ab"
    assert ending("s3fifo", 10, *prompts, last=2) == "11"
    assert ending("lru", 10, *prompts, last=2) == "00"
    assert ending("s3fifo", 10, *"abab", *OTHERS[:20], "a", "b", last=2) == "00", "once more is not enough"


@pytest.mark.parametrize(("others", "kept"), [(10, "1"), (18, "1"), (19, "0")])
def test_s3fifo_remembers_what_it_let_go(others: int, kept: str) -> None:
    """What comes back while it is remembered, for nine others that left after it, stays in spite of twenty more."""
    assert ending("s3fifo", 10, "a", *OTHERS[:others], "a", *OTHERS[others : others + 20], "a") == kept


def targets(capacity: int, *prompts: str) -> list[float]:
    policy = POLICIES["arc"]()
    found = []

    class Watched(Replay):
        def _request(self, now: float, first: int, last: int) -> int:
            hits = super()._request(now, first, last)
            found.append(policy.eviction._target)  # type: ignore[attr-defined]
            return hits

    Watched(trace_of(prompts), policy, capacity, seconds).run()
    return found


def test_arc_moves_its_target_both_ways() -> None:
    """`a` and `b` are used often; `c` and `d` come once, leave, and come back too late: there should be more room for
    such. Then `a`, which left for that, comes back: there should be less."""
    assert targets(4, *"aabb", *"cdef", *"cd", "a") == [0.0] * 8 + [1.0, 2.0, 1.0]


def test_arc_learns_faster_from_the_shorter_memory() -> None:
    """One is remembered of those that were used once, and comes back, and two of those used often: it counts double."""
    assert targets(3, *"bdfdccbeaf")[-2:] == [1.0, 3.0]


def test_arc_withstands_a_scan() -> None:
    prompts = "abab" + OTHERS[:20] + "ab"
    assert ending("arc", 4, *prompts, last=2) == "11"
    assert ending("lru", 4, *prompts, last=2) == "00"


def test_all_is_remembered_that_leaves_for_a_large_prompt() -> None:
    """Room for it is made before it comes, so that for a moment next to nothing is held."""
    assert ending("s3fifo", 8, "a", "bcdefghi", "a", *OTHERS[:20], "a") == "1"
    assert ending("arc", 8, "ab", "ab", "cdefgh", "ijklmnop", "ab", *OTHERS[:20], "ab") == "2"


def test_second_touch_lets_in_what_is_asked_for_again() -> None:
    assert played("second_touch", 2, *"aaa") == [0, 0, 1]
    assert ending("second_touch", 2, *"aabb", *OTHERS, "a") == "1"
    replay = Replay(trace_of(["abc", "abd", "abc"]), POLICIES["second_touch"](), 9, seconds)
    assert replay.run().entered == 3, "a and b with the second prompt, c with the third"


def test_the_default_evicts_what_is_worth_least() -> None:
    """Worth is by class, age and cost together."""
    for seed in range(3):
        reuse = Reuse()
        valued = Valued(reuse)
        tier = KitTier(valued, seed, capacity=1 << 20)
        head = tier.node(size=200)
        nodes = [*(tier.node(size=size) for size in (1, 3, 9)), *(tier.node(head, size) for size in (1, 2))]
        for _ in range(60):
            tier.ask(tier.chance.choice(nodes[: tier.chance.randrange(1, 6)]))
            values = {node: valued.value(node) for node in tier.held if node.evictable}
            victim = tier.victim()
            assert victim is not None
            assert values[victim] == min(values.values())
            for node, value in values.items():
                rate = reuse.rate(class_of(node.uses), valued._pace.time - node.note[1])
                assert value == pytest.approx(rate * node.seconds / node.size)
        assert len(set(values.values())) > 3


def test_sieve_does_not_look_at_what_cannot_go() -> None:
    """Of many, nearly all of which are in use."""
    looked = 0

    class Looked(Node):
        busy = True

        @property
        def evictable(self) -> bool:
            nonlocal looked
            looked += 1
            return self.held and not self.busy

    sieve, nodes = Sieve(), [Looked(number, 1, None) for number in range(1000)]
    for node in nodes:
        node.held = True
        sieve.enter(node)
        sieve.offer(node)
    nodes[7].busy = False
    sieve.offer(nodes[7])
    looked = 0
    for _ in range(10):
        assert sieve.victim() is nodes[7]
    assert looked < 100


def test_sieve_goes_on_at_the_oldest_when_the_newest_is_dropped() -> None:
    """Not only as its victim: a block may have to go for other reasons."""
    sieve, (a, b, c, d) = Sieve(), [Node(number, 1, None) for number in range(4)]

    def come(node: Node) -> None:
        node.held = True
        sieve.enter(node)
        sieve.offer(node)

    def go(node: Node) -> None:
        node.held = False
        sieve.leave(node)

    for node in (a, b, c):
        come(node)
    sieve.refer(a, 1.0)
    assert sieve.victim() is b
    go(b)
    go(c)
    come(d)
    assert sieve.victim() is a


def test_a_victim_of_the_default_is_followed_by_what_stands_before_it() -> None:
    """Blocks of one prefix with one history go one after the other, though others are worth as little."""
    tier = KitTier(Valued(Reuse()), capacity=1 << 20)
    for _ in range(20):
        tier.ask(tier.node(tier.node(tier.node())))
    while (victim := tier.victim()) is not None:
        chain = victim.path()[:0:-1]
        for node in chain:
            assert tier.victim() is node
            tier.evict(node)
    assert not tier.held


def test_expected_value_lets_in_what_is_worth_more_than_what_goes() -> None:
    valued = Valued(Reuse())
    admission = ExpectedValue(valued)
    tier = KitTier(valued, capacity=1 << 20)
    cheap, dear = tier.node(), tier.node(tier.node(size=300))
    tier.ask(dear)
    tier.ask(cheap)
    assert valued.value(dear) > valued.value(cheap)
    assert admission.admits(dear, cheap)
    assert not admission.admits(cheap, dear)
    assert admission.admits(cheap, None), "there is room"
    assert admission.admits(cheap, cheap), "of equals, what came last"
