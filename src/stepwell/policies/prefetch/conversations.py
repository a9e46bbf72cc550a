"""Which requests are turns of one conversation: those that go on from where an earlier one ended.

Engines name no conversations. What is known of one is its chain of blocks: the prompt of its last request, and the
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

MOST_CONVERSATIONS: Final = 512
MOST_BLOCKS: Final = 1 << 17
"""Ids remembered, 32 bytes each, of all conversations together: 4 MiB. Those that went on longest ago are forgotten."""

MOST_CHAIN: Final = 1 << 12
"""Blocks of a prompt. A longer one is nobody's turn."""

ID_BYTES: Final = 32


class Conversation:
    """`blocks`: the ids of its chain, one after the other. `prompt`: how many of them its last request asked for.
    `last`: when that was, seconds. `turn`: how many there were; 0 once it is forgotten. `tag`: of its namespace.
    `asker`: whoever asked last, as its owner knows him."""

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
    """Those that went on last; at most MOST_CONVERSATIONS with MOST_BLOCKS together."""

    def __init__(self) -> None:
        self._by_prompt: OrderedDict[bytes, Conversation] = OrderedDict()  # by the last block of the prompt
        self._by_tail: dict[bytes, Conversation] = {}  # by the last block of the chain
        self._ids = 0

    def __len__(self) -> int:
        return len(self._by_prompt)

    @property
    def ids(self) -> int:
        """That are remembered."""
        return self._ids

    def ends(self, id: BlockId) -> bool:
        """The prompt of some conversation's last turn ends with this block."""
        return id in self._by_prompt

    def asked(self, tag: bytes, ids: Sequence[BlockId], at: int | None, now: float) -> Conversation | None:
        """A request came, with these blocks in its prompt. `at`: the last of them that `ends` a prompt; None: none
        does, and a conversation begins. The answer is None if it is too long to be remembered."""
        if not 0 < len(ids) <= MOST_CHAIN:
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
        while len(self._by_prompt) > MOST_CONVERSATIONS or self._ids > MOST_BLOCKS:
            self._forget(next(iter(self._by_prompt.values())))
        return conversation

    def followed(self, parent: BlockId, id: BlockId) -> None:
        """This block was spilled, behind that one."""
        conversation = self._by_tail.get(parent)
        if conversation is None or id in self._by_tail or self._ids >= MOST_BLOCKS:
            return
        del self._by_tail[parent]
        conversation.blocks += id
        self._by_tail[id] = conversation
        self._ids += 1

    def forget(self, tag: bytes) -> Iterator[None]:
        """All of this namespace; of all, if it is empty. In steps of one conversation."""
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
