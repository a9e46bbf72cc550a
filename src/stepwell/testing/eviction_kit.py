"""The contract of eviction policies as tests: subclass `EvictionKit`, supply `make`, and pytest runs them.

`KitTier` is an owner of items that does everything an owner may do, in every allowed order: it asks, refuses, evicts
whole items and ends of them, drops, splits, forgets, and has items in use.
"""

from __future__ import annotations

import gc
import random
from abc import ABC, abstractmethod
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from stepwell.policies.eviction.base import Eviction


class Node:
    """An item: some blocks behind those of its parent."""

    def __init__(self, start: int, size: int, parent: Node | None) -> None:
        self.start, self.size = start, size
        self.parent = parent
        self.kids: list[Node] = []
        self.held = False
        self.users = 0
        self.uses = 0
        self.used = 0.0
        self.note: Any = None
        self.listed = 0

        self.price()

    def price(self) -> None:
        """Makes late blocks cost more."""
        self.seconds = sum(1.0 + 0.1 * at for at in range(self.start, self.start + self.size))

    @property
    def evictable(self) -> bool:
        return self.held and not self.users and not any(kid.held for kid in self.kids)

    def path(self) -> list[Node]:
        return [*(self.parent.path() if self.parent is not None else []), self]


class KitTier:
    """A tier of at most `capacity` blocks that remembers at most `memory` items beside them."""

    def __init__(self, eviction: Eviction, seed: int = 0, *, capacity: int = 40, memory: int = 60) -> None:
        self.eviction = eviction
        self.chance = random.Random(seed)
        self.capacity, self.memory = capacity, memory
        self.now = 0.0
        self.root = Node(0, 0, None)  # root of all prefixes; itself no item
        self.held: dict[Node, None] = {}
        self.remembered: dict[Node, None] = {}  # oldest first
        self.in_use: list[list[Node]] = []
        self.evicted: list[tuple[int, int, float]] = []

    @property
    def blocks(self) -> int:
        return sum(node.size for node in self.held)

    def node(self, parent: Node | None = None, size: int = 1) -> Node:
        """A new node, which was never asked for."""
        parent = parent or self.root
        made = Node(parent.start + parent.size, size, parent)
        parent.kids.append(made)
        return made

    def ask(self, last: Node, *, refuse: float = 0.0) -> None:
        """A request for all nodes up to `last`. `refuse`: probability that admission refuses one."""
        self.now += self.chance.expovariate(1.0) + 1e-6
        path = last.path()[1:]
        for node in reversed(path):
            self.eviction.refer(node, self.now)
            node.uses += 1
            node.used = self.now
            self.remembered.pop(node, None)
        if not all(node.held for node in path):
            self._let_in(path, refuse)
        while len(self.remembered) > self.memory:
            self.forget(next(iter(self.remembered)))

    def victim(self) -> Node | None:
        found = self.eviction.victim()
        if found is None:
            assert not any(node.evictable for node in self.held), "something could go"
            return None
        assert isinstance(found, Node)
        assert found.held and found.evictable
        return found

    def evict(self, node: Node) -> None:
        self.evicted.append((node.start, node.size, node.used))
        self._leave(node)
        self.remembered[node] = None

    def drop(self, node: Node) -> None:
        """Drops a node that is no victim; it is not remembered."""
        self._leave(node)
        self._forget(node)

    def forget(self, node: Node) -> None:
        del self.remembered[node]
        self._forget(node)

    def split(self, node: Node, size: int) -> Node:
        """Leaves the node `size` blocks and returns the rest."""
        tail = Node(node.start + size, node.size - size, node)
        node.size = size
        node.price()
        tail.kids, node.kids = node.kids, [tail]
        for kid in tail.kids:
            kid.parent = tail
        tail.held, tail.users, tail.uses, tail.used, tail.note = node.held, node.users, node.uses, node.used, node.note
        for path in self.in_use:
            if node in path:
                path.insert(path.index(node) + 1, tail)
        if node.held:
            self.held[tail] = None
        elif node in self.remembered:
            self.remembered[tail] = None
        self.eviction.split(node, tail)
        return tail

    def begin_use(self, last: Node) -> None:
        self.in_use.append(last.path()[1:])
        self._use(self.in_use[-1], 1)

    def end_use(self) -> None:
        path = self.in_use.pop(0)
        self._use(path, -1)
        for node in path:
            if node.held:
                self.eviction.offer(node)

    def drain(self) -> None:
        """Evicts until nothing is held."""
        while self.in_use:
            self.end_use()
        while (victim := self.victim()) is not None:
            self.evict(victim)
        assert not self.held

    def step(self) -> None:
        """Anything that an owner may do."""
        chance = self.chance.random()
        if chance < 0.70:
            parent = self.chance.choice([self.root, *self.held, *self.remembered])
            fresh = not parent.start + parent.size or self.chance.random() < 0.3
            self.ask(self.node(parent, self.chance.randrange(1, 6)) if fresh else parent, refuse=0.05)
        elif chance < 0.80:
            self._anywhere(
                lambda node: self.split(node, self.chance.randrange(1, node.size)) if node.size > 1 else None
            )
        elif chance < 0.88 and self.held:
            self.begin_use(self.chance.choice(list(self.held)))
        elif chance < 0.92 and self.remembered:
            self.forget(self.chance.choice(list(self.remembered)))
        elif chance < 0.95:
            ends = [node for node in self.held if not node.users and not any(kid.held for kid in node.kids)]
            if ends:
                self.drop(self.chance.choice(ends))
        else:
            self._anywhere(self.eviction.offer)
        while len(self.in_use) > 3:
            self.end_use()

    def _anywhere(self, act: Any) -> None:
        if nodes := [*self.held, *self.remembered]:
            act(self.chance.choice(nodes))

    def _use(self, path: list[Node], by: int) -> None:
        for node in path:
            node.users += by

    def _let_in(self, path: list[Node], refuse: float) -> None:
        self._use(path, 1)
        for node in path:
            if not node.held and not self._has_room(node.size, refuse):
                break
            if not node.held:
                node.held = True
                self.held[node] = None
                self.eviction.enter(node)
        self._use(path, -1)
        for node in path:
            if node.held:
                self.eviction.offer(node)
            else:
                self.remembered[node] = None

    def _has_room(self, size: int, refuse: float) -> bool:
        while (room := self.capacity - self.blocks) < size:
            victim = self.victim()
            if victim is None or self.chance.random() < refuse:
                return False
            short = size - room
            self.evict(self.split(victim, victim.size - short) if victim.size > short else victim)
        return True

    def _leave(self, node: Node) -> None:
        node.held = False
        del self.held[node]
        self.eviction.leave(node)
        if node.parent is not None and node.parent is not self.root:
            self.eviction.offer(node.parent)

    def _forget(self, node: Node) -> None:
        self.eviction.forget(node)
        node.uses = 0
        while not (node is self.root or node.held or node.uses or node.kids or node.users):
            assert node.parent is not None
            node.parent.kids.remove(node)
            node = node.parent


def entries(eviction: Eviction) -> int:
    """Number of objects that the policy keeps, items and their notes included."""
    passed = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
    seen: dict[int, object] = {}
    todo: list[object] = [eviction]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, passed):
            continue
        seen[id(one)] = one
        todo.extend([one.note] if isinstance(one, Node) else gc.get_referents(one))
    return len(seen)


MAX_ENTRIES = 30
"""Most entries for each item that is held or remembered."""

MAX_OVERHEAD = 2_500
"""Objects beside them: tables, and records that are void but not yet found."""


class EvictionKit(ABC):
    @abstractmethod
    def make(self) -> Eviction: ...

    def tier(self, seed: int | None = None, *, capacity: int = 40, memory: int = 60) -> KitTier:
        seed = random.randrange(1 << 32) if seed is None else seed
        print("seed", seed)  # noqa: T201 - what repeats a failure
        return KitTier(self.make(), seed, capacity=capacity, memory=memory)

    def bounded(self, tier: KitTier) -> None:
        items = len(tier.held) + len(tier.remembered)
        assert entries(tier.eviction) <= entries(self.make()) + MAX_OVERHEAD + MAX_ENTRIES * items

    def test_of_nothing_there_is_no_victim(self) -> None:
        tier = self.tier()
        assert tier.victim() is None
        tier.ask(tier.node())
        tier.drain()
        assert tier.victim() is None

    def test_whatever_the_owner_does_victims_can_go_and_all_go(self) -> None:
        """`KitTier` looks at each victim, and that there is one while anything can go."""
        for _ in range(10):
            tier = self.tier()
            for _ in range(2):
                for _ in range(150):
                    tier.step()
                tier.drain()

    def test_a_victim_stays_in_place(self) -> None:
        tier = self.tier()
        for _ in range(6):
            tier.ask(tier.node(size=3))
        for _ in range(20):
            assert tier.victim() is not None
        assert len(tier.held) == 6
        tier.drain()

    def test_what_is_in_use_and_what_is_behind_it_stays(self) -> None:
        tier = self.tier()
        head = tier.node(size=4)
        tail = tier.node(head, 4)
        tier.ask(tail)
        tier.begin_use(tail)
        assert tier.victim() is None
        other = tier.node()
        tier.ask(other)
        assert tier.victim() is other
        tier.evict(other)
        assert tier.victim() is None
        tier.end_use()
        assert tier.victim() is tail
        tier.evict(tail)
        tier.begin_use(head)
        assert tier.victim() is None
        tier.end_use()
        assert tier.victim() is head

    def test_a_split_leaves_two_that_go_tail_first(self) -> None:
        for sizes in ((1,), (5, 2), (2, 4), (3, 3, 1)):
            tier = self.tier()
            node = tier.node(size=8)
            tier.ask(node)
            parts = [node]
            for size in sizes:
                widest = max(parts, key=lambda part: part.size)
                parts.insert(parts.index(widest) + 1, tier.split(widest, size % widest.size or 1))
            assert sum(part.size for part in parts) == 8
            gone = []
            while (victim := tier.victim()) is not None:
                gone.append(victim)
                tier.evict(victim)
            assert gone == parts[::-1]

    def test_the_same_again_gives_the_same_victims(self) -> None:
        one, other = self.tier(7), self.tier(7)
        for tier in (one, other):
            for _ in range(400):
                tier.step()
        assert one.evicted == other.evicted
        assert len(one.evicted) > 20

    def test_nothing_is_kept_of_what_is_gone(self) -> None:
        """Memory is bounded by the items held and remembered, whatever happens meanwhile, and however often."""
        tier = self.tier()
        for _ in range(2500):
            tier.step()
        self.bounded(tier)

    def test_nothing_is_kept_of_what_was_dropped(self) -> None:
        """A tier that is cleared before it is full never asks for a victim."""
        tier = self.tier(capacity=1 << 30)
        for _ in range(300):
            nodes = [tier.node(size=2) for _ in range(10)]
            for node in nodes:
                tier.ask(node)
            for node in nodes:
                tier.drop(node)
        self.bounded(tier)
        assert tier.victim() is None

    def test_nothing_is_kept_of_what_comes_and_goes(self) -> None:
        """The same items, over and over, remembered all the time; and then others that are asked for twice."""
        tier = self.tier(capacity=10, memory=40)
        for _ in range(150):
            for node in [*tier.held, *tier.remembered] or [tier.node(size=2) for _ in range(20)]:
                tier.ask(node)
        self.bounded(tier)
        for _ in range(1500):
            node = tier.node(size=1)
            tier.ask(node)
            tier.ask(node)
        self.bounded(tier)
