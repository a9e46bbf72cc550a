"""Division of a layer's hot tokens."""

from __future__ import annotations

from dataclasses import dataclass

from stepwell.errors import ConfigError
from stepwell.longctx.policy import Policy


@dataclass(frozen=True, slots=True)
class HotBudget:
    """Hot tokens per layer and row. Up to `total` tokens nothing steps down. Beyond it: the first `sinks` tokens, a
    tail of `window` to `window + slack` recent ones, of which whole pages step down whenever it is full, and `pool`
    pages that have stepped down and were fetched again."""

    total: int
    sinks: int
    window: int
    slack: int
    pool: int

    @classmethod
    def divide(cls, hot_tokens: int, policy: Policy) -> HotBudget:
        """Raises ConfigError SW-130 if sinks, window and slack do not fit."""
        slack = max(2 * policy.page_tokens, 2 * policy.draft_tokens + 2, 32)
        least = policy.sinks + (policy.window or policy.page_tokens) + slack
        if hot_tokens < least:
            raise ConfigError(
                "SW-130",
                what=f"hot_tokens={hot_tokens} is too small for the policy {policy.name!r}",
                why=f"its sinks and window, and room for pages that are about to step down, take {least} tokens",
                fix=f"give it at least {least} hot tokens, or a policy with a smaller window or smaller pages",
            )
        if policy.window is None:
            return cls(hot_tokens, policy.sinks, hot_tokens - policy.sinks - slack, slack, 0)
        return cls(hot_tokens, policy.sinks, policy.window, slack, (hot_tokens - least) // policy.page_tokens)

    def to_spill(self, tail: int, page_tokens: int) -> int:
        """Pages that step down from a tail of this length: none until it is full, then down to the window."""
        if tail <= self.window + self.slack:
            return 0
        return (tail - self.window - self.slack // 2) // page_tokens
