"""What came of the requests to an engine, and the rows that tell it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lab.trust.engine.prompts import OUTPUT, Prompt
from lab.trust.peer.harm import Harm
from lab.trust.peer.module import HANGS_S, hung_row
from lab.trust.peer.subjects import Subject
from lab.trust.report import Row
from stepwell.client.patience import TOTAL_S
from stepwell.demo.wire import Answer

_NOISE_S = 0.1


@dataclass(slots=True)
class Seen:
    """Of one harm: requests that recalled something, that did not, whose outputs differ, and that failed. `blocks`:
    what the well did with some meanwhile. `struck`: how often a well was killed, or the disk kept to its rules."""

    recalled: int = 0
    missed: int = 0
    differ: int = 0
    failed: int = 0
    struck: int = 0
    blocks: Counter[str] = field(default_factory=Counter)
    evidence: list[str] = field(default_factory=list)
    why: str = ""

    def take(self, prompt: Prompt, answer: Answer) -> None:
        self.recalled += answer.cached_tokens > 0
        self.missed += not answer.cached_tokens
        if wrong := prompt.wrong(answer, OUTPUT):
            self.differ += answer.finish_reason == "length"
            self.failed += answer.finish_reason != "length"
            self.evidence = self.evidence or [wrong]

    def fail(self, what: str) -> None:
        self.failed += 1
        self.evidence.append(what)

    def told(self) -> str:
        blocks = "".join(f", {n} {what}" for what, n in sorted(self.blocks.items()) if n)
        return (
            f"{self.recalled} recalled, {self.missed} missed, {self.differ} answered otherwise, {self.failed} failed"
            f"{blocks}{f', struck {self.struck} times' if self.struck else ''}"
        )

    def row(self, kind: type[Subject], harm: Harm, seed: int, said: str) -> Row:
        wrong, evidence = self.differ + self.failed, list(self.evidence)
        met = self.blocks[harm.shown] if harm.shown else self.struck
        if kind.ours and self.recalled + self.missed and not met:
            wrong, evidence = wrong + 1, [*evidence, f"{harm.shown or 'times that it struck'}: 0, so it was not tried"]
        remark = said + (f"not tried: {self.why}" if self.why else self.told())
        promise = f"{kind.who}: answered and equal, {harm.name}"
        return Row(promise, self.recalled + self.missed, wrong, seed, remark, evidence, comparison=not kind.ours)


@dataclass(slots=True)
class Hung(Seen):
    """Of requests of which one read hung: in seconds, by how much their first tokens came later than those of misses
    for as many tokens as were computed, and how long these took."""

    later_s: list[float] = field(default_factory=list)
    missed_s: list[float] = field(default_factory=list)

    def row(self, kind: type[Subject], harm: Harm, seed: int, said: str) -> Row:
        """Of ours each is judged: in all it may wait for `TOTAL_S`, if other reads bring something now and then. Two
        prefills on a busy machine differ by less than one of them."""
        promise = f"{kind.who}: a hanging read is not waited for"
        if self.why:
            return Row(promise, 0, 0, seed, f"{said}not tried: {self.why}", comparison=not kind.ours)
        if not kind.ours:
            return hung_row(promise, self.later_s, seed, f"{said}a request")
        allowed = [TOTAL_S + max(_NOISE_S, missed_s) for missed_s in self.missed_s]
        late = sum(later_s > most for later_s, most in zip(self.later_s, allowed, strict=True))
        remark = f"{said}first tokens up to {max(self.later_s, default=0):.2f} s later than those of misses when a "
        remark += f"read hung for {HANGS_S:g} s; allowed {TOTAL_S:g} s and what two misses differ by; {self.told()}"
        evidence = [*self.evidence, *([] if self.later_s else ["no read hung: nothing was tried"])]
        evidence += [f"later by {self.later_s}, misses took {self.missed_s}"] * bool(late)
        wrong = late + self.differ + self.failed + (not self.later_s)
        return Row(promise, len(self.later_s), wrong, seed, remark, evidence)
