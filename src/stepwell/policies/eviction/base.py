"""The interface of eviction policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from stepwell.policies.item import Item


class Eviction(ABC):
    """Chooses what leaves a tier of a fixed capacity. For each request, its owner

    1. calls `refer` for every item of the request, tail to head, whether it is held or not, and then counts the use in
       the item (so a policy still sees when it was used before);
    2. makes room for what is missing: `victim`, then `leave`, as often as needed; of a large victim it may take only
       the end, which it splits off before;
    3. calls `enter` for each item that is held from now on, head to tail;
    4. calls `offer` for each item that may have become evictable.

    An item that left, or that was not let in, may be remembered by the owner, and is then the same object when it comes
    again. `forget` ends that.
    """

    @abstractmethod
    def victim(self) -> Item | None:
        """The next item to leave, which stays in place; None if nothing is evictable."""

    def few(self, n: int) -> Iterable[Item]:
        """Up to about `n` of the next items to leave, the very next one among them, in no order."""
        victim = self.victim()
        return () if victim is None else (victim,)

    @abstractmethod
    def offer(self, item: Item) -> None:
        """The item may have become evictable; it may also not be, or not be held."""

    def refer(self, item: Item, now: float) -> None:  # noqa: B027 - most policies need only some of these
        """The item is asked for now, held or not."""

    def refer_all(self, items: Sequence[Item], now: float) -> None:
        """The same for several, each there once; their uses are counted when all were referred to."""
        for item in items:
            self.refer(item, now)

    def enter(self, item: Item) -> None:  # noqa: B027
        """The item is held from now on."""

    def leave(self, item: Item) -> None:  # noqa: B027
        """The item is not held any longer: mostly the last victim, but any other item may have to be dropped."""

    def split(self, head: Item, tail: Item) -> None:  # noqa: B027
        """`tail` was the end of `head` until now; both have its former history and note. Whether they are held can be
        seen from the note alone."""

    def forget(self, item: Item) -> None:  # noqa: B027
        """An item that is not held will come as a new one, if ever."""
