"""Engines and wells die, stop and come back: requests end well, blocks survive what they can, nothing is left behind.

In bfloat16, with pages of 32 tokens that are blocks of their own. The tests form one story and run in this order.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from stepwell.demo.engine import EngineFailed, EngineProcess
from stepwell.demo.wire import Answer, Question

from .wells import RECALL_ATTEMPTS, Well, config, eventually, forget, recalled, receipt, start, warm_up

PAGE = 32
PROMPT, WHOLE = 530, 512
BLOCKS = WHOLE // PAGE
LOGPROBS = {"logprobs": 0}


@dataclass
class Lives:
    """The engine of the moment; `next` starts another one."""

    new: Callable[[int], EngineProcess]
    number: int = 0

    def next(self) -> EngineProcess:
        self.number += 1
        self.engine = self.new(self.number)
        return self.engine


@pytest.fixture(scope="module")
def lives(model: Path, folder: Path, well: Well) -> Iterator[Lives]:
    with ExitStack() as stack:

        def new(number: int) -> EngineProcess:
            settings = config(model, well.connector(block_tokens=PAGE), page=PAGE, pool_pages=50)
            engine = stack.enter_context(start(settings, folder, f"engine{number}"))
            warm_up(engine, PAGE)
            return engine

        yield Lives(new)


def in_thread(ask: Callable[[], list[Answer]]) -> Future[list[Answer]]:
    future: Future[list[Answer]] = Future()

    def run() -> None:
        try:
            future.set_result(ask())
        except EngineFailed as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def serving(engine: EngineProcess, well: Well, texts: list[list[int]]) -> Future[list[Answer]]:
    """Three requests under way, of which the well has heard."""
    before = well.stats()["requests"]
    future = in_thread(lambda: engine.ask_all([Question(text[:300], 48) for text in texts]))
    eventually(lambda: well.stats()["requests"] > before, "the well is asked")
    return future


def answered(future: Future[list[Answer]], limit_s: float = 120) -> None:
    for answer in future.result(limit_s):
        assert (answer.finish_reason, len(answer.token_ids)) == ("length", 48)


def test_a_recall_in_bfloat16_equals_an_engine_hit(lives: Lives, well: Well, texts: list[list[int]]) -> None:
    engine, prompt = lives.next(), texts[0][:PROMPT]
    engine.ask(prompt, 32)
    hit = engine.ask(prompt, 32, **LOGPROBS)
    forget(engine)
    again = recalled(engine, prompt, **LOGPROBS)
    assert (hit.local_tokens, hit.external_tokens) == (WHOLE, 0)
    assert (again.local_tokens, again.external_tokens) == (0, WHOLE)
    assert again.token_ids == hit.token_ids
    assert again.logprobs == hit.logprobs
    print(f"ttft hit {hit.ttft_s:.3f} recalled {again.ttft_s:.3f} s, {receipt(again)}")


def test_the_well_is_killed_while_requests_run(lives: Lives, well: Well, texts: list[list[int]]) -> None:
    killed = well.pid()
    future = serving(lives.engine, well, texts[1:4])
    os.kill(killed, signal.SIGKILL)
    answered(future)
    warm_up(lives.engine, PAGE)
    assert well.pid() != killed
    assert well.stats()["sessions"] == 1


def test_the_well_is_stopped_while_requests_run(lives: Lives, well: Well, texts: list[list[int]]) -> None:
    engine, prompt, pid = lives.engine, texts[0][:PROMPT], well.pid()
    expected = engine.ask(prompt, 32).token_ids
    future = serving(engine, well, texts[4:7])
    os.kill(pid, signal.SIGSTOP)
    try:
        answered(future)
        forget(engine)
        missed = engine.ask(prompt, 32)
        assert (missed.local_tokens, missed.external_tokens) == (0, 0)
        assert missed.token_ids == expected
        print(f"with the well stopped: ttft {missed.ttft_s:.3f} s")
    finally:
        os.kill(pid, signal.SIGCONT)
    warm_up(engine, PAGE)
    assert well.pid() == pid
    eventually(well.is_idle, "nothing is held")


def test_clients_that_leave_are_not_answered_and_leave_nothing(
    lives: Lives, well: Well, texts: list[list[int]]
) -> None:
    """While their recall is under way, or their prompt is computed, or tokens are; others are answered."""
    engine, prompt = lives.engine, texts[0][:PROMPT]
    expected = engine.ask(prompt, 8).token_ids
    for leaves_s in (0.0, 0.02, 0.1, 0.4, 1.0):
        forget(engine)
        gone = [Question(prompt, 32, leaves_s=leaves_s), Question(texts[11][:PROMPT], 32, leaves_s=leaves_s)]
        *left, answer = engine.ask_all([*gone, Question(prompt, 8)])
        assert [(one.finish_reason, one.token_ids) for one in left] == [("abort", [])] * 2
        assert answer.token_ids == expected
        eventually(well.is_idle, "nothing is held")


def test_a_killed_engine_leaves_nothing_but_blocks(lives: Lives, well: Well, texts: list[list[int]]) -> None:
    """The last request's blocks are spilled with no other request behind it."""
    upto = well.stats()["spilled_blocks"] + BLOCKS
    for _ in range(RECALL_ATTEMPTS):  # spills of a machine that is far too busy are given up
        forget(lives.engine)
        lives.engine.ask(texts[7][:PROMPT], 1)
        with suppress(AssertionError):
            eventually(lambda: well.stats()["spilled_blocks"] >= upto, "the idle engine has spilled", seconds=20.0)
            break
    assert well.stats()["spilled_blocks"] >= upto
    lives.engine.kill()
    eventually(well.is_alone, "the dead engine holds nothing")
    assert well.stats()["blocks"] >= BLOCKS


def test_a_new_engine_recalls_what_a_killed_one_spilled(lives: Lives, well: Well, texts: list[list[int]]) -> None:
    engine, prompt = lives.next(), texts[7][:PROMPT]
    again, hit = recalled(engine, prompt, **LOGPROBS), engine.ask(prompt, 32, **LOGPROBS)
    assert (again.local_tokens, again.external_tokens) == (0, WHOLE)
    assert (hit.local_tokens, hit.external_tokens) == (WHOLE, 0)
    assert again.token_ids == hit.token_ids
    assert again.logprobs == hit.logprobs


def test_a_killed_worker_ends_its_engine_and_nothing_else(lives: Lives, well: Well, texts: list[list[int]]) -> None:
    engine, pid = lives.engine, well.pid()
    workers = [p for p in engine.pids() if b"Worker" in Path(f"/proc/{p}/cmdline").read_bytes()]
    assert len(workers) == 1
    future = serving(engine, well, texts[8:11])
    os.kill(workers[0], signal.SIGKILL)
    with pytest.raises(EngineFailed):
        future.result(120)
    engine.kill()
    eventually(well.is_alone, "quarantine has ended with the engine's processes")
    assert well.pid() == pid
    assert well.stats()["blocks"] >= BLOCKS
