"""One request after the other recalls from a device whose reads all stand still at times, for a while or for good.

A recall is rounds of READERS reads. What a request waits for is the end of one round; whoever gives up computes what is
missing. Times are those of a device that is RATIO times as fast as computing.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stepwell.client.patience import STALL_S
from stepwell.hierarchy.levels.breaker import OVERDUE_S
from stepwell.hierarchy.levels.speed import HealthyReads, LateReads, allowance_s
from stepwell.protocol.messages import MAX_ALLOWED_S

READERS, ROUND_S, RATIO = 4, 0.008, 4
BETWEEN_S = 0.5
"""From a request's first token to the next request."""

LEAST_S, MOST_S = 0.1, 5.0
"""To compute a request: anything between, as many in each part of a logarithmic scale."""


@dataclass(frozen=True, slots=True)
class Weather:
    """A stall comes once in `every_s` seconds on average, in the first `share` of each PERIOD_S (the device is written
    to), and lasts `median_s`, by a factor of e^`spread` more or less; or HANG_S, once in `per_hang`; 0: never."""

    every_s: float
    median_s: float
    spread: float
    share: float = 1.0
    per_hang: int = 0

    def stalls(self, dice: random.Random) -> Iterator[tuple[float, float]]:
        """When each begins and ends."""
        at = 0.0
        while True:
            at += dice.expovariate(1 / self.every_s)
            if at % PERIOD_S < self.share * PERIOD_S:
                hangs = self.per_hang and dice.randrange(self.per_hang) == 0
                yield at, (at := at + (HANG_S if hangs else self.median_s * math.exp(dice.gauss(0, self.spread))))


PERIOD_S, HANG_S = 60.0, 5.0


class Device:
    """`healthy`, `late`: what the product has learned of its reads."""

    def __init__(self, stalls: Iterator[tuple[float, float]]) -> None:
        self._stalls = stalls
        self._stall = next(stalls)
        self.healthy, self.late = HealthyReads(), LateReads()
        self._reading: deque[tuple[float, float]] = deque()  # rounds that were given up: when they began and end

    def read(self, now: float) -> float:
        """When a round ends that begins now. Time does not go back."""
        while self._stall[1] <= now:
            self._stall = next(self._stalls)
        begins, ends = self._stall
        return max(now, ends) + ROUND_S - max(0.0, begins - now) if begins < now + ROUND_S else now + ROUND_S

    def ended(self, seconds: float) -> None:
        for _ in range(READERS):
            self.late.took(seconds, good=True)
            if seconds <= OVERDUE_S:
                self.healthy.took(seconds)

    def given_up(self, began: float, ends: float) -> None:
        self._reading.append((began, ends))

    def oldest_s(self, now: float) -> float:
        """Age of the oldest read that has not ended, at `now`."""
        while self._reading and self._reading[0][1] <= now:
            began, ends = self._reading.popleft()
            self.ended(ends - began)
        return now - self._reading[0][0] if self._reading else 0.0


Rule = Callable[[Device, float, float, float], float]
"""How long a request waits for a round: by the device, the age of its oldest read, what is at stake, and how long the
round takes, which only hindsight knows."""


def today(device: Device, oldest_s: float, stake_s: float, takes_s: float) -> float:
    return STALL_S + device.healthy.slowest_s


def by_stakes(device: Device, oldest_s: float, stake_s: float, takes_s: float) -> float:
    return STALL_S + allowance_s(device.healthy, device.late, oldest_s, stake_s)


def most(device: Device, oldest_s: float, stake_s: float, takes_s: float) -> float:
    return STALL_S + MAX_ALLOWED_S


def endless(device: Device, oldest_s: float, stake_s: float, takes_s: float) -> float:
    return math.inf


def hindsight(device: Device, oldest_s: float, stake_s: float, takes_s: float) -> float:
    return math.inf if takes_s < stake_s else 0.0


RULES: dict[str, Rule] = {
    "healthy reads": today,
    "stakes": by_stakes,
    "300 ms": most,
    "total limit": endless,
    "hindsight": hindsight,
}


@dataclass(slots=True)
class Result:
    """Seconds: to first tokens, waited in vain, of those the longest, and lost by giving up what came soon after."""

    requests: int = 0
    given_up: int = 0
    ttft_s: float = 0.0
    in_vain_s: float = 0.0
    longest_s: float = 0.0
    too_soon_s: float = 0.0


def replay(weather: Weather, rule: Rule, requests: int, seed: int, between_s: float = BETWEEN_S) -> Result:
    device, sizes = Device(weather.stalls(random.Random(seed))), random.Random(-seed)
    result, now = Result(), 0.0
    for _ in range(requests):
        compute_s = LEAST_S * (MOST_S / LEAST_S) ** sizes.random()
        first_token = _recall(device, rule, now, compute_s, result)
        result.requests += 1
        result.ttft_s += first_token - now
        now = first_token + between_s
    return result


def _recall(device: Device, rule: Rule, came: float, compute_s: float, result: Result) -> float:
    """When it has its first token."""
    rounds = max(1, round(compute_s / RATIO / ROUND_S))
    oldest_s = device.oldest_s(came)
    if oldest_s > OVERDUE_S:
        return came + compute_s  # the breaker is open
    now = came
    for left in range(rounds, 0, -1):
        rest_s, ends = left / rounds * compute_s, device.read(now)
        stake_s = rest_s - left * ROUND_S
        waits_s = min(rule(device, oldest_s, stake_s, ends - now), came + compute_s - now)
        if ends - now > waits_s:
            device.given_up(now, ends)
            result.given_up += 1
            result.in_vain_s += waits_s
            result.longest_s = max(result.longest_s, waits_s)
            result.too_soon_s += max(0.0, stake_s - (ends - now - waits_s))
            return now + waits_s + rest_s
        device.ended(ends - now)
        now, oldest_s = ends, device.oldest_s(ends)
    return now
