"""What came of the requests, by the fault that was on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lab.trust.report import ended_by
from stepwell.demo.wire import Answer

_MOST_EVIDENCE = 10


@dataclass(slots=True)
class Findings:
    """Violations: all are counted, the first ones described."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, what: str, count: int = 1) -> None:
        self.count += count
        if len(self.first) < _MOST_EVIDENCE:
            self.first.append(what)


@dataclass(slots=True)
class Tally:
    """By the name of a fault: requests that were to be `answered`, those that were `aborted`, times that the fault took
    effect, tokens recalled meanwhile. `starts` and `ended_engines`: of engines. `seen`: what the wells counted, by the
    names of their stats. `ended`: why the rest was not tried."""

    answered: Counter[str] = field(default_factory=Counter)
    aborted: Counter[str] = field(default_factory=Counter)
    effects: Counter[str] = field(default_factory=Counter)
    recalled: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    from_disk: int = 0
    preempted: int = 0
    resets: int = 0
    killed: int = 0
    starts: int = 0
    ended_engines: int = 0
    looks: int = 0
    ended: str = ""
    unstarted: Findings = field(default_factory=Findings)
    wrong: Findings = field(default_factory=Findings)
    leaks: Findings = field(default_factory=Findings)
    left: Findings = field(default_factory=Findings)

    @property
    def requests(self) -> int:
        return self.answered.total() + self.aborted.total()

    def take(self, fault: str, answer: Answer) -> None:
        """Counts what its receipt says was recalled."""
        receipt = (answer.kv_transfer_params or {}).get("stepwell", {})
        self.recalled[fault] += receipt.get("recalled_tokens", 0)
        self.from_disk += receipt.get("tiers", {}).get("disk", 0)

    def ends(self, promise: Findings, error: Exception) -> None:
        """The rest is not tried because of this, which breaks the promise."""
        promise.add(ended_by(error))
        self.ended = str(error).splitlines()[0] if str(error) else type(error).__name__

    def remark(self) -> str:
        """Which faults were on for how many requests and how often they took effect, and which were never met."""
        kinds = [f"{name} {self.answered[name]}/{self.effects[name]}/{self.recalled[name]}" for name in self.answered]
        never = [name for name in self.answered if not self.effects[name] and name != "no fault"]
        counted = [f"{name.removeprefix('disk_')} {n}" for name, n in sorted(self.seen.items()) if n]
        return "; ".join(
            [
                f"requests answered under each fault/times it took effect/tokens recalled: {', '.join(kinds)}",
                f"{self.recalled.total()} tokens recalled in all, {self.from_disk} of them from disk",
                *([f"the well counted {', '.join(counted)}"] if counted else []),
                *([f"never met: {', '.join(never)}"] if never else []),
                *([f"the rest was not tried: {self.ended}"] if self.ended else []),
            ]
        )
