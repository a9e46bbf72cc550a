"""What the engines under test are asked, and what a plain vLLM answers to it.

Prompts are pieces of real documents, several with the same beginning. What is right is measured: the same vLLM without
a connector, in float32, one prompt at a time. The last bits of its numbers depend on what else is in a batch, so
prompts are left out of whose answer any token was less than `CLEAR` ahead of the next best one: of the others the
tokens do not depend on it, whatever else the engine does at the time, and their log probabilities by less than `CLOSE`.
Measured: by 2e-5, in batches of four.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stepwell.demo.documents import DemoDocument
from stepwell.demo.engine import EngineProcess
from stepwell.demo.wire import Answer

TAILS = 3
SHORTEST, LONGEST = 64, 160
"""Tokens of the beginning that several prompts share, and of what follows."""

OUTPUT = 6
CLEAR, CLOSE = 0.02, 1e-3
"""In log probability."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`answer` are the tokens that a plain engine goes on with, `logprobs` theirs."""

    tokens: tuple[int, ...]
    answer: tuple[int, ...]
    logprobs: tuple[float, ...]

    def wrong(self, answer: Answer, asked: int) -> str:
        """What is wrong with an answer of so many tokens, at most those that are known; empty if nothing is."""
        if len(answer.token_ids) != asked or answer.logprobs is None:
            return f"{len(answer.token_ids)} of {asked} tokens, finished by {answer.finish_reason}"
        if tuple(answer.token_ids) != self.answer[:asked]:
            return f"{answer.token_ids} instead of {list(self.answer[:asked])}"
        pairs = zip(answer.logprobs, self.logprobs, strict=False)
        if all(now is not None and abs(now - right) < CLOSE for now, right in pairs):
            return ""
        return f"the right tokens, but log probabilities {answer.logprobs} instead of {list(self.logprobs[:asked])}"


def draw(documents: Sequence[DemoDocument], dice: random.Random, page: int) -> list[tuple[int, ...]]:
    """`TAILS` prompts that begin alike for each document. They end one to three tokens before an engine's page does,
    so that each needs another page for its answer, and requests are preempted where none is free."""
    prompts = []
    for document in documents:
        shared = dice.randrange(SHORTEST, LONGEST)
        for _ in range(TAILS):
            length = dice.randrange(SHORTEST, LONGEST)
            length -= (shared + length + dice.randrange(1, 4)) % page
            at = dice.randrange(shared, len(document.prompt) - length)
            prompts.append((*document.prompt[:shared], *document.prompt[at : at + length]))
    return prompts


def answered(plain: EngineProcess, prompts: Iterable[tuple[int, ...]], output: int = OUTPUT) -> list[Prompt]:
    """Those whose answers, of so many tokens, are clear. Raises EngineFailed."""
    found = []
    for prompt in prompts:
        answer = plain.ask(list(prompt), output, logprobs=2)
        clear = answer.margins is not None and all(one is not None and one >= CLEAR for one in answer.margins)
        logprobs = [one for one in answer.logprobs or [] if one is not None]
        if clear and len(logprobs) == output:
            found.append(Prompt(prompt, tuple(answer.token_ids), tuple(logprobs)))
    return found
