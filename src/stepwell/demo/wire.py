"""Messages between a driver and its engine process: one JSON object a line, in each direction.

The driver (`engine.Engine`) sends a command and waits for its one answer; the process (`engine_main`) sends
`EngineReady` once, unasked. Times are seconds on the engine process's monotonic clock, counts are tokens. Not a public
protocol: both ends are of the same version.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Question(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request: greedy and of exactly `max_tokens` tokens, unless `sampling` (SamplingParams fields) says otherwise.

    It comes when the engine has made `after` steps for the questions asked with it, or has nothing else to do.
    `adapter`: name, number and folder of a LoRA adapter to run it with. `leaves_s`: seconds after which it is aborted,
    unanswered, whatever its state; the engine goes on with the others meanwhile, but their times count until then.
    """

    prompt: list[int] | str
    max_tokens: int = 32
    salt: str | None = None
    sampling: dict[str, Any] = {}
    after: int = 0
    adapter: tuple[str, int, str] | None = None
    leaves_s: float | None = None


class Answer(msgspec.Struct, frozen=True):
    """One finished request, in vLLM's own words.

    `cached_tokens` is what vLLM reports for the request; `local_tokens` of them came from the engine's own prefix
    cache and `external_tokens` from the connector (both None if another request ended its prefill in the same step,
    as vLLM counts these two per step). `logprobs` are those of the answer's tokens, if `sampling` asked for them, and
    `margins` by how much each was ahead of the next best token, if it asked for two or more; None is what was no number
    (NaN), as wrong KV makes it. An aborted request has no tokens, and "abort" for its `finish_reason`.
    """

    ttft_s: float
    total_s: float
    prompt_tokens: int
    token_ids: list[int]
    text: str
    finish_reason: str | None
    cached_tokens: int
    local_tokens: int | None
    external_tokens: int | None
    kv_transfer_params: dict[str, Any] | None = None
    logprobs: list[float | None] | None = None
    margins: list[float | None] | None = None

    @property
    def tiers(self) -> dict[str, int]:
        """Tokens that were recalled, by where they lay, as a receipt of stepwell says."""
        tiers: dict[str, int] = (self.kv_transfer_params or {}).get("stepwell", {}).get("tiers", {})
        return tiers


class AskAll(msgspec.Struct, frozen=True, tag=True):
    """Run these at the same time, or each `after` its number of steps; answered by `Answers` in the same order."""

    questions: list[Question]


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Forget the engine's own prefix cache, and with `connector` tell the connector to; answered by `CommandDone`."""

    connector: bool = False


class Nap(msgspec.Struct, frozen=True, tag=True):
    """Sleep at level 1, which forgets all KV, and wake up again; answered by `CommandDone`."""


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Load this adapter (name, number, folder), as a server does on request; answered by `CommandDone`."""

    adapter: tuple[str, int, str]
    in_place: bool = False


class GetMetrics(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Metrics`."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Shut the engine down in good order; answered by `CommandDone`, then the process ends."""


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """The engine is up. Its pool has `pages` of `page` tokens, of one cache group each. `keeps_prefixes`: asked for the
    same again, it has its own hit."""

    version: str
    page: int
    pages: int
    keeps_prefixes: bool


class Answers(msgspec.Struct, frozen=True, tag=True):
    answers: list[Answer]


class Metrics(msgspec.Struct, frozen=True, tag=True):
    """Counters and gauges of vLLM by name, summed over their labels."""

    values: dict[str, float]


class CommandDone(msgspec.Struct, frozen=True, tag=True):
    """The command has ended. `ok` False: the engine declined, for example a reset while requests run."""

    ok: bool = True


class CommandFailed(msgspec.Struct, frozen=True, tag=True):
    """The command raised in the engine process, which goes on."""

    message: str


Command = AskAll | LoadAdapter | Nap | ResetPrefixCache | GetMetrics | Shutdown
Reply = EngineReady | Answers | Metrics | CommandDone | CommandFailed
