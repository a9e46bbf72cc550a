"""What is asked for a request of vLLM's offloading: runs of keys, one at a time for each cache group."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from stepwell.client.questions import PrefixQuestion


@dataclass(slots=True, eq=False)
class KeyRun:
    """Keys that are asked for together, in the order in which they were looked up. `blocks`: how many leading ones can
    be had, once that is settled, and `reason`: why not more. `further`: questions for the run without its first key,
    without its first two, and so on. `streams`: not all of them have landed yet. `admitted`: there are rows for all of
    them."""

    keys: list[bytes] = field(default_factory=list)
    at: dict[bytes, int] = field(default_factory=dict)
    digests: bytearray = field(default_factory=bytearray)
    end_token: int = 0
    ask: PrefixQuestion | None = None
    further: deque[PrefixQuestion] = field(default_factory=deque)
    blocks: int = -1
    streams: bool = False
    admitted: bool = False
    reason: str = ""
    looked: int = -1  # step in which one of its keys was last looked up
    looked_at: float = 0.0  # when that was
    settled_at: float = 0.0

    def add(self, key: bytes, end_token: int) -> None:
        self.at[key] = len(self.keys)
        self.keys.append(key)
        self.digests += digest_of_key(key)
        self.end_token = max(self.end_token, end_token)

    def shorten(self) -> bytes:
        """Goes on with the next question. Returns the key that is not of the run any more."""
        self.ask = self.further.popleft()
        self.at = {key: at - 1 for key, at in self.at.items() if at}
        del self.digests[:32]
        return self.keys.pop(0)

    def questions(self) -> list[PrefixQuestion]:
        return ([] if self.ask is None else [self.ask]) + list(self.further)


@dataclass(frozen=True, slots=True)
class ChunkGroup:
    """A cache group of the engine. `tokens`: how many a chunk has. `window`: how many chunks at the end of a prefix a
    load needs; None: all of the prefix."""

    tokens: int = 0
    window: int | None = None


@dataclass(slots=True, eq=False)
class GroupLookup:
    """One cache group of a request. `closed`: keys that are misses from now on. `promoted`: rows that it was given."""

    of_engine: ChunkGroup
    run: KeyRun | None = None
    closed: set[bytes] = field(default_factory=set)
    rounds: int = 0
    promoted: int = 0


@dataclass(slots=True, eq=False)
class RequestLookup:
    """One request. `loading`: jobs that fill rows for it now."""

    order: int
    groups: dict[int, GroupLookup] = field(default_factory=dict)
    loading: int = 0
    progress_at: float = 0.0  # when it was first looked up, or last promoted anything
    reach: tuple[int, int] = (-1, 0)  # a step, and the tokens that groups which need all of a prefix had then at most


@dataclass(frozen=True, slots=True)
class LoadPart:
    """A run that is a job's now: what it asked for is pinned or on its way, and nothing else changes it."""

    run: KeyRun
    epoch: int

    @property
    def ask(self) -> PrefixQuestion:
        assert self.run.ask is not None
        return self.run.ask

    def rows(self, keys: Sequence[bytes], rows: Sequence[int]) -> dict[int, tuple[bytes, int]]:
        """Which blocks of the run go to which of these rows: by the block's number, its key and its row."""
        at, blocks = self.run.at, self.run.blocks
        found = ((at.get(key, blocks), key, row) for key, row in zip(keys, rows, strict=True))
        return {number: (key, row) for number, key, row in found if number < blocks}

    def digest(self, number: int) -> bytes:
        return bytes(self.run.digests[32 * number : 32 * number + 32])


def digest_of_key(key: bytes) -> bytes:
    """The digest under which the well knows a chunk: of vLLM's hash of the prefix and the cache group's number."""
    return blake3(key).digest()


def group_of(key: bytes) -> int:
    return int.from_bytes(key[-4:], "big")
