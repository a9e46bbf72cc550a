"""Requests to real engines while faults befall their well."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from lab.bench import storage
from lab.bench.serving import engines
from lab.rig.well import until
from lab.trust.budget import Budget
from lab.trust.engine.faults import CALM, Fault, kinds
from lab.trust.engine.prompts import Prompt
from lab.trust.engine.tally import Tally
from lab.trust.engine.well import TestedWell
from stepwell.demo.engine import EngineConfig, EngineFailed, EngineProcess, is_tracker
from stepwell.demo.wire import Question
from stepwell.errors import StepwellError

EPISODE = 10
"""Requests under one fault, in a few rounds."""

TOGETHER = (1, 2, 3, 4)
"""Requests of one round, each of these equally likely."""

PATIENCE_S = 20.0
_POLL_S = 0.05
"""In which what was held for requests that have ended must be given back, and a lost well be joined again. 5 s are
promised where the machine is not busy."""

_ABORTS, _GONE_WITHIN_S = 0.15, 0.6
_RESETS, _RESETS_OF_ALL = 0.3, 0.01
_EMPTIED = 0.3
_STEPS_APART = 6
_UNSALTED, _ROUNDS_OF_A_SALT = 0.5, 12
"""A new salt makes old prompts new to the well: there is always something to be written."""

_STRIKES_WITHIN_S = 0.4
_MOST_FAILURES = 5
_COUNTED = ("disk_not_recalled_", "disk_errors_", "disk_skipped_", "misses_tier_down", "misses_not_readable", "engine_")


class NotStarted(Exception):
    """An engine with the connector did not get ready, or recalled nothing."""


class Trial:
    """One well and its engines, one after the other. At the end `close`, whatever happened."""

    def __init__(
        self, well: TestedWell, config: EngineConfig, prompts: Sequence[Prompt], budget: Budget, name: str = "engine"
    ) -> None:
        """With another `name` than that of the campaign it has dice of its own, and all prompts fit into host memory,
        which is emptied now and then."""
        self.tally = Tally()
        self._name = name
        self._well = well
        self._config = config
        self._prompts = prompts
        self._budget = budget
        self._dice = budget.dice(name, "rounds")
        self._striker = ThreadPoolExecutor(1, "striker")
        self._faults = _in_turn(kinds(well), budget.dice(name, "faults"))
        self._unmet: Fault | None = None
        self._rounds = self._failures = 0
        self._preempted = 0  # requests of the present engine that have been counted
        self._engine: EngineProcess | None = None

    @property
    def engine(self) -> EngineProcess:
        """The present one, which `begin` has brought."""
        assert self._engine is not None
        return self._engine

    def begin(self) -> None:
        """A new engine; the first one starts the well. Raises NotStarted."""
        self.tally.starts += 1
        try:
            self._engine = self._start()
        except (EngineFailed, TimeoutError) as error:
            raise NotStarted(str(error)) from error

    def fill(self) -> None:
        """Everything is asked once, and goes down to the disk."""
        for prompt in self._prompts:
            self._ask(CALM, [(prompt, Question(list(prompt.tokens), len(prompt.answer), sampling={"logprobs": 0}))])
        until(lambda: self._well.stats().get("disk_write_queue_bytes") == 0, PATIENCE_S, _POLL_S)

    def serve(self, requests: int) -> None:
        """So many more requests, under one fault after the other, each begun episode to its end. A fault that nothing
        met, as a disk that failed a moment ago is left alone, comes again after the next one."""
        most = self.tally.requests + requests
        while self.tally.requests < most and not self._budget.over:
            unmet, self._unmet = self._unmet, None
            self._episode(next(self._faults))
            if unmet is not None:
                self._episode(unmet)

    def live(self, requests: int, lives: int) -> None:
        """So many requests in all, to engines of which each but the last is killed. Raises NotStarted."""
        for life in range(lives):
            if life:
                self.kill_engine()
            self.serve((requests - self.tally.requests) // (lives - life))

    def kill_engine(self) -> None:
        """One of its processes is killed while it serves, and those that are left a moment later. What becomes of its
        requests is the engine's; nothing may be held for it then. Its well ends too, so that the next engine starts one
        that finds everything on disk. Raises NotStarted."""
        dice = self._dice
        questions = [Question(list(prompt.tokens), 16) for prompt in dice.sample(self._prompts, 3)]
        asking = self._striker.submit(_ask_in_vain, self.engine, questions)
        time.sleep(dice.uniform(0, _STRIKES_WITHIN_S))
        os.kill(dice.choice([pid for pid in self.engine.pids() if not is_tracker(pid)]), signal.SIGKILL)
        time.sleep(dice.uniform(0, _STRIKES_WITHIN_S))
        self._end(self.engine.kill)
        asking.result()
        self.tally.killed += 1
        self._stop_well()
        self.begin()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Closes it behind the block. Raises nothing: what ends either of them early is counted."""
        try:
            yield
        except NotStarted as error:
            self.tally.ends(self.tally.unstarted, error)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is counted, and what was counted is told
            self.tally.ends(self.tally.wrong, error)
        try:
            self.close()
        except Exception as error:  # noqa: BLE001 - the same
            self.tally.ends(self.tally.left, error)

    def close(self) -> None:
        """Ends engine and well in good order, and looks for what they have left."""
        self._striker.shutdown()
        if self._engine is not None:
            self._end(self._engine.close)
        self._stop_well()
        if not until(lambda: not self._well.left(), PATIENCE_S, _POLL_S):
            for what in self._well.left():
                self.tally.left.add(what)

    # one fault --------------------------------------------------------------------------------------------------------

    def _episode(self, fault: Fault) -> None:
        tally, dice = self.tally, self._dice
        before, most = self._well.stats(), tally.requests + EPISODE
        tally.effects[fault.name] += fault.begin(dice)
        try:
            while tally.requests < most and not self._budget.over:
                self._round(fault, fault.strike)
        finally:
            tally.effects[fault.name] += fault.end(dice)
        deadline = time.monotonic() + PATIENCE_S
        while not self._well.serves() and time.monotonic() < deadline:
            self._round(fault)  # it is over, and not forgotten
        for what in self._well.unrefused:
            tally.wrong.add(what)
        self._well.unrefused.clear()
        self._count(before)
        preempted = int(self.engine.metrics().get("vllm:num_preemptions", 0))
        self.tally.preempted += preempted - self._preempted
        self._preempted = preempted
        self._look(f"after {fault.name}, round {self._rounds}", engines=1)
        if not tally.effects[fault.name] and fault is not CALM:
            self._unmet = fault
        told = f"{self._name}: {tally.requests} requests, {tally.wrong.count} wrong; {fault.name}"
        self._budget.tell(f"{told}: {tally.effects[fault.name]}x")

    def _count(self, before: dict[str, int | float | str]) -> None:
        """What the well has counted since; all of it, if it is another one."""
        after = self._well.stats()
        same = before.get("pid") == after.get("pid")
        for name, value in after.items():
            if name.startswith(_COUNTED) and isinstance(value, int):
                was = before.get(name, 0) if same else 0
                self.tally.seen[name] += value - (was if isinstance(was, int) else 0)

    def _look(self, when: str, *, engines: int) -> None:
        """Nobody asks for anything: nothing may be held."""
        self.tally.looks += 1
        if not until(lambda: not self._well.held(engines=engines), PATIENCE_S, _POLL_S):
            self.tally.leaks.add(f"{when}: {self._well.held(engines=engines)}")

    # one round --------------------------------------------------------------------------------------------------------

    def _round(self, fault: Fault, strike: Callable[[random.Random], int] | None = None) -> None:
        dice = self._dice
        if dice.random() < _RESETS:
            everything = dice.random() < _RESETS_OF_ALL
            self.tally.resets += self.engine.reset_prefix_cache(connector=everything)
        if self._name != "engine" and dice.random() < _EMPTIED:
            self._well.forget_host()
        asked = [self._question(place) for place in range(dice.choice(TOGETHER))]
        striking = None
        if strike is not None:
            striking = self._striker.submit(_after, dice.uniform(0, _STRIKES_WITHIN_S), strike, dice.getrandbits(64))
        try:
            self._ask(fault, asked)
        finally:
            if striking is not None:
                self.tally.effects[fault.name] += striking.result()

    def _question(self, place: int) -> tuple[Prompt, Question]:
        dice = self._dice
        prompt = dice.choice(self._prompts)
        gone = dice.uniform(0, _GONE_WITHIN_S) if dice.random() < _ABORTS else None
        after = dice.randrange(_STEPS_APART) if place else 0
        salt = None if dice.random() < _UNSALTED else str(self._rounds // _ROUNDS_OF_A_SALT)
        return prompt, Question(
            list(prompt.tokens), dice.randint(1, len(prompt.answer)), salt, {"logprobs": 0}, after=after, leaves_s=gone
        )

    def _ask(self, fault: Fault, asked: Sequence[tuple[Prompt, Question]]) -> None:
        self._rounds += 1
        tally, when = self.tally, f"{fault.name}, round {self._rounds}"
        gone = sum(question.leaves_s is not None for _, question in asked)
        tally.aborted[fault.name] += gone
        tally.answered[fault.name] += len(asked) - gone
        try:
            answers = self.engine.ask_all([question for _, question in asked])
        except EngineFailed as error:
            tally.wrong.add(f"{when}: {error.what}", len(asked) - gone)
            self._failures += 1
            if self._failures == _MOST_FAILURES:
                raise
            self._start_again()
            return
        for (prompt, question), answer in zip(asked, answers, strict=True):
            if question.leaves_s is None:
                tally.take(fault.name, answer)
                if wrong := prompt.wrong(answer, question.max_tokens):
                    tally.wrong.add(f"{when}: {wrong}")

    # engines ----------------------------------------------------------------------------------------------------------

    def _start(self) -> EngineProcess:
        self._preempted = 0
        engine = EngineProcess.start(self._config, self._well.folder / f"{self._name}.log")
        try:
            engines.warm_up(engine, self._config.page)
        except BaseException:
            engine.kill()
            raise
        return engine

    def _start_again(self) -> None:
        """After a failure, which has been counted. Raises NotStarted."""
        self._end(self.engine.kill)
        self.begin()

    def _stop_well(self) -> None:
        try:
            self._well.stop()
        except StepwellError as error:
            self.tally.left.add(f"the well did not end when it was told: {error}")

    def _end(self, end: Callable[[], None]) -> None:
        """The engine is gone afterwards, and so should be what was held for it."""
        shared = storage.shared_files(self.engine.pids())
        self.tally.ended_engines += 1
        end()
        self._engine = None
        self._look(f"after engine {self._rounds}", engines=0)
        if not until(lambda: not any(path.exists() for path in shared), PATIENCE_S, _POLL_S):
            self.tally.left.add(f"shared memory {', '.join(sorted(path.name for path in shared if path.exists()))}")


def _in_turn(faults: Sequence[Fault], dice: random.Random) -> Iterator[Fault]:
    """Each once in a random order, then each once in another, and so on."""
    while True:
        yield from dice.sample(faults, len(faults))


def _after(seconds: float, strike: Callable[[random.Random], int], seed: int) -> int:
    time.sleep(seconds)
    return strike(random.Random(seed))


def _ask_in_vain(engine: EngineProcess, questions: list[Question]) -> None:
    with contextlib.suppress(EngineFailed):
        engine.ask_all(questions)
