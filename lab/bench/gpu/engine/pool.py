"""The engine's pages: free or held, and what a prefix left in them is found again until they are taken for another.

Page 0 belongs to nobody, as in vLLM.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np


def prefixes(tokens: Sequence[int], page: int) -> list[bytes]:
    """A hash of the tokens up to the end of each whole page."""
    found, hasher = [], hashlib.blake2b(digest_size=16)
    for end in range(page, len(tokens) + 1, page):
        hasher.update(np.asarray(tokens[end - page : end], np.int64).tobytes())
        found.append(hasher.copy().digest())
    return found


class PagePool:
    def __init__(self, pages: int) -> None:
        self._free = OrderedDict.fromkeys(range(1, pages))  # the next to be taken first
        self._holders: dict[int, int] = {}
        self._pages: dict[bytes, int] = {}
        self._prefix: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """New pages; what was in them is forgotten. None: there are not so many."""
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
            prefix = self._prefix.pop(page, None)
            if prefix is not None:
                del self._pages[prefix]
        return taken

    def give_back(self, pages: Sequence[int]) -> None:
        """Tails are taken again before heads."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                self._free[page] = None

    def publish(self, prefix: bytes, page: int) -> None:
        """What is in the page can be found."""
        if prefix not in self._pages and page not in self._prefix:
            self._pages[prefix], self._prefix[page] = page, prefix

    def find(self, wanted: Iterable[bytes]) -> list[int]:
        """Pages of the leading prefixes that are here, held for the caller."""
        found = []
        for prefix in wanted:
            page = self._pages.get(prefix)
            if page is None:
                break
            found.append(page)
            self._holders[page] = self._holders.get(page, 0) + 1
            self._free.pop(page, None)
        return found

    def forget(self) -> None:
        """Nothing is found any more."""
        self._pages.clear()
        self._prefix.clear()
