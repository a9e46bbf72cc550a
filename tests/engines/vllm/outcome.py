"""What a harness says of its requests: what their clients saw, and what was wrong with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class Stuck(AssertionError):
    """The engine still had something to do after as many steps as the test allows."""


@dataclass(frozen=True, slots=True)
class WrongToken:
    """The client was given a token that the request's context does not lead to."""

    step: int
    request_id: str
    position: int

    def __str__(self) -> str:
        return f"step {self.step}: wrong output token {self.position} for {self.request_id}"


@dataclass(slots=True)
class Outcome:
    """What became of a request, as its client saw it, and what it cost."""

    request_id: str
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    """Output tokens delivered."""
    finish_reason: str | None = None
    """length, abort, error, ...; None while alive, and for ever if its engine ended first."""
    local: int = 0
    external: int = 0
    """Prompt tokens that vLLM reports as cached, in its own pool and by the connector, at first admission."""
    computed: int = 0
    """Tokens given to forwards, recomputation included."""
    preemptions: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    last_step: int = 0

    @property
    def cached(self) -> int:
        return self.local + self.external
