"""Conversations: requests that continue earlier ones.

Engines name no conversations. A conversation is known by its chain of blocks: the prompt of its last request, and the
blocks that were spilled behind it since. A request whose prompt holds the last block of an earlier prompt is its next
turn, and the two are one conversation from then on.

    first turn   a b c            spilled behind it: d        chain a b c d, found by c (and d is what follows d)
    next turn    a b c d e f      holds c                     chain a b c d e f, found by f
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Final

from stepwell.block.namespace import BlockId
from stepwell.policies.prefetch.rhythm import Rhythm

MAX_CONVERSATIONS: Final = 512
MAX_BLOCKS: Final = 1 << 17
"""Ids remembered, 32 bytes each, of all conversations together: 4 MiB. Those that went on longest ago are forgotten."""

MAX_CHAIN: Final = 1 << 12
"""Most blocks of a prompt that is remembered. A longer one is not part of a conversation."""

ID_BYTES: Final = 32


class Conversation:
    """A conversation. `blocks`: ids of its chain, in order. `prompt`: number of blocks that its last request asked for.
    `last`: time of that request, in seconds. `turn`: number of its requests; 0 once it is forgotten. `tag`: its
    namespace. `asker`: the origin of the last request, as the owner knows it."""

    __slots__ = ("asker", "blocks", "last", "prompt", "rhythm", "tag", "turn")

    def __init__(self, tag: bytes) -> None:
        self.tag = tag
        self.asker: Any = None
        self.blocks = bytearray()
        self.prompt = 0
        self.rhythm = Rhythm()
        self.last = 0.0
        self.turn = 0

    def __len__(self) -> int:
        return len(self.blocks) // ID_BYTES

    def block(self, at: int) -> BlockId:
        return BlockId(bytes(self.blocks[ID_BYTES * at : ID_BYTES * (at + 1)]))


class Conversations:
    """The most recent conversations; at most MAX_CONVERSATIONS, with MAX_BLOCKS together."""

    def __init__(self) -> None:
        self._by_prompt: OrderedDict[bytes, Conversation] = OrderedDict()  # by the last block of the prompt
        self._by_tail: dict[bytes, Conversation] = {}  # by the last block of the chain
        self._ids = 0

    def __len__(self) -> int:
        return len(self._by_prompt)

    @property
    def ids(self) -> int:
        """Number of ids remembered."""
        return self._ids

    def ends(self, id: BlockId) -> bool:
        """The prompt of some conversation's last turn ends with this block."""
        return id in self._by_prompt

    def asked(self, tag: bytes, ids: Sequence[BlockId], at: int | None, now: float) -> Conversation | None:
        """A request with these blocks in its prompt has come. `at`: position of the last of them that `ends` a prompt;
        None: a conversation begins. Returns the conversation; None if it is too long to be remembered."""
        if not 0 < len(ids) <= MAX_CHAIN:
            return None
        conversation = self._by_prompt.get(ids[at]) if at is not None else None
        if conversation is None:
            conversation = Conversation(tag)
        else:
            self._take_out(conversation)
            conversation.rhythm.took(now - conversation.last)
        conversation.blocks = bytearray(b"".join(ids))
        conversation.prompt = len(ids)
        conversation.last = now
        conversation.turn += 1
        if (other := self._by_prompt.get(ids[-1])) is not None:
            self._forget(other)
        self._by_prompt[ids[-1]] = conversation
        self._by_tail[ids[-1]] = conversation
        self._ids += len(ids)
        while len(self._by_prompt) > MAX_CONVERSATIONS or self._ids > MAX_BLOCKS:
            self._forget(next(iter(self._by_prompt.values())))
        return conversation

    def followed(self, parent: BlockId, id: BlockId) -> None:
        """The block `id` was spilled behind the block `parent`."""
        conversation = self._by_tail.get(parent)
        if conversation is None or id in self._by_tail or self._ids >= MAX_BLOCKS:
            return
        del self._by_tail[parent]
        conversation.blocks += id
        self._by_tail[id] = conversation
        self._ids += 1

    def forget(self, tag: bytes) -> Iterator[None]:
        """Forgets the conversations of this namespace, or all if it is empty, one conversation a step."""
        for conversation in list(self._by_prompt.values()):
            if tag in (b"", conversation.tag) and conversation.turn:
                self._forget(conversation)
            yield

    def _forget(self, conversation: Conversation) -> None:
        self._take_out(conversation)
        conversation.turn = 0

    def _take_out(self, conversation: Conversation) -> None:
        del self._by_prompt[conversation.block(conversation.prompt - 1)]
        tail = conversation.block(len(conversation) - 1)
        if self._by_tail.get(tail) is conversation:
            del self._by_tail[tail]
        self._ids -= len(conversation)
