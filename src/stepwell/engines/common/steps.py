"""Steps under way: what each computes, when all ranks have ended it well, its time, and how much may be copied.

Steps show what prefill costs: what each computes is known when it is planned, how long it took when it ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from stepwell.policies.costs.prefill import pairs

MAX_STEPS = 64
"""Steps whose reports may be outstanding; an older one will not come any more."""

Work = tuple[int, float]
"""Tokens, and pairs that attention looks at."""

DECODES = 8
"""A request with at most so many tokens in a step is decoding (some of them guessed), not computing a prompt."""

MIN_TOKENS, MIN_SHARE = 16, 0.9
"""Least number and share of prompt tokens in a step that shows what prefill costs."""


MIN_BYTES = 64 << 20
"""Bytes that a step may copy however little was computed: some 10 ms on a CPU, 3 ms beside a forward on a GPU."""


class Computes(NamedTuple):
    """A request's part in a step. `life`: see `Tracked`. `after`: tokens of the request that are computed when the step
    has ended. `tokens`: how many of them the step computes itself."""

    request: str
    life: int
    after: int
    tokens: int


@dataclass(slots=True)
class _Step:
    computes: list[Computes]
    ranks: int = 0  # that have ended it well


@dataclass(slots=True)
class Steps:
    """A step is confirmed when `world` ranks have reported it. Steps end in order: one that is not confirmed when a
    later one is will never be, it raised or its report is lost."""

    world: int
    _under_way: dict[int, _Step] = field(default_factory=dict)

    def begin(self, number: int, computes: list[Computes]) -> None:
        if not computes:
            return
        self._under_way[number] = _Step(computes)
        while len(self._under_way) > MAX_STEPS:
            del self._under_way[next(iter(self._under_way))]

    def ended(self, ranks: Mapping[int, int]) -> Iterator[Computes]:
        """Parts of steps that are confirmed now. `ranks`: how many more have ended each step."""
        for number, more in ranks.items():
            step = self._under_way.get(number)
            if step is None:
                continue
            step.ranks += more
            if step.ranks < self.world:
                continue
            for old in [n for n in self._under_way if n <= number]:
                del self._under_way[old]
            yield from step.computes


class StepTimes:
    """Samples of what prefill costs, from steps that compute prompts. The number of steps under way is bounded."""

    def __init__(self) -> None:
        self._under_way: dict[int, Work] = {}

    def begin(self, number: int, requests: Iterable[tuple[int, int]]) -> None:
        """Notes a planned step. `requests`: tokens that it computes for each, and tokens before them."""
        tokens = prompts = 0
        seen = 0.0
        for n, before in requests:
            tokens += n
            prompts += n if n > DECODES else 0
            seen += pairs(n, before)
        if prompts >= MIN_TOKENS and prompts >= MIN_SHARE * tokens:
            self._under_way[number] = tokens, seen
            if len(self._under_way) > MAX_STEPS:
                del self._under_way[next(iter(self._under_way))]

    def ended(self, seconds: Mapping[int, float]) -> Iterator[tuple[int, float, float]]:
        """Samples from steps that have ended. `seconds`: time of the slowest rank, by step."""
        for number, took in seconds.items():
            if (step := self._under_way.pop(number, None)) is not None and took > 0:
                yield *step, took


class SaveRoom:
    """A step may copy as many bytes of KV as were computed by the steps that have been confirmed since the last plan
    but one (slots may be granted a step late, and blocks end where steps do not), and `MIN_BYTES` in any case. So
    what is yet to be copied does not pile up, whatever the model and the size of its steps: a model of 8 B parameters
    computes 1 GiB in a step of 8,192 tokens. What is copied in urgency, before pages are taken, counts too: what is
    beyond it then is given up.

    That is a small share of the time that computing took, wherever it is spent (estimates for that model). On a CPU the
    next step copies, 13 to 26 us a token, which took it some 10 ms to compute. On a GPU the copy runs beside the next
    forward: 25 ms for 1 GiB, which took 250 ms to compute.
    """

    def __init__(self, token_bytes: float) -> None:
        """`token_bytes`: bytes of a token's KV on one rank."""
        self._token_bytes = token_bytes
        self._earlier = self._computed = self._spent = 0.0

    def computed(self, tokens: int) -> None:
        """Adds tokens of a step that is confirmed."""
        self._computed += tokens * self._token_bytes

    @property
    def left(self) -> float:
        return max(MIN_BYTES, self._earlier + self._computed) - self._spent

    def spend(self, nbytes: int) -> None:
        self._spent += nbytes

    def next_step(self) -> None:
        self._earlier, self._computed, self._spent = self._computed, 0.0, 0.0
