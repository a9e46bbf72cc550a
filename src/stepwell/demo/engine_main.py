"""The engine process of the demo, tests and benchmarks: a real vLLM that obeys JSON lines (`wire`).

Run by `engine.Engine` as `python -m stepwell.demo.engine_main ENGINE_ARGUMENTS_AS_JSON`. Commands come on standard
input and answers go to what was standard output; descriptor 1 then points at standard error, so that vLLM's own
prints, and those of its processes, cannot spoil the lines. When its input ends, even in the middle of a command, it
ends all processes of the engine: they never outlive their driver.

vLLM runs as its offline API runs it: this process as frontend, an engine core and a worker.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec

from stepwell.demo.engine import is_tracker, session_members
from stepwell.demo.wire import (
    Answer,
    Answers,
    AskAll,
    Command,
    CommandDone,
    CommandFailed,
    EngineReady,
    GetMetrics,
    LoadAdapter,
    Metrics,
    Nap,
    Question,
    Reply,
    ResetPrefixCache,
    Shutdown,
)


class PrefillCounts:
    """A vLLM stat logger that keeps where the cached prompt tokens of the last step came from."""

    def __init__(self) -> None:
        self.local = self.external = 0

    def logger_class(self) -> type:
        from vllm.v1.metrics.loggers import StatLoggerBase

        counts = self

        class Logger(StatLoggerBase):
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                """Keeps nothing: the counts belong to the session."""

            def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
                if iteration_stats is not None:
                    counts.local = iteration_stats.prompt_token_stats.local_cache_hit
                    counts.external = iteration_stats.prompt_token_stats.external_kv_transfer

            def log_engine_initialized(self) -> None:
                """Logs nothing."""

        return Logger


@dataclass(slots=True)
class Live:
    """A request in flight; times are of the monotonic clock."""

    began: float
    ttft_s: float | None = None
    local: int | None = None
    external: int | None = None


class Arrivals:
    """Order in which the questions come, each once."""

    def __init__(self, questions: Sequence[Question]) -> None:
        self._waiting = sorted((question.after, at) for at, question in enumerate(questions))

    def due(self, steps: int, *, idle: bool) -> list[int]:
        """Indexes of the questions that come after this number of steps; at least one if the engine has nothing else to
        do."""
        count = sum(after <= steps for after, _ in self._waiting)
        count = max(count, min(1, len(self._waiting)) if idle else 0)
        due, self._waiting = self._waiting[:count], self._waiting[count:]
        return [at for _, at in due]


@dataclass(slots=True)
class EngineSession:
    """The engine and the requests that one command at a time puts through it."""

    engine: Any
    counts: PrefillCounts
    asked: int = 0
    live: dict[str, Live] = field(default_factory=dict)

    @classmethod
    def start(cls, arguments: dict[str, Any]) -> EngineSession:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        counts = PrefillCounts()
        engine = LLMEngine.from_engine_args(EngineArgs(**arguments), stat_loggers=[counts.logger_class()])
        return cls(engine, counts)

    def ask(self, questions: list[Question]) -> list[Answer]:
        try:
            arrivals, steps = Arrivals(questions), 0
            names: dict[int, str] = {}
            done: dict[str, Answer] = {}
            while len(done) < len(questions):
                due = arrivals.due(steps, idle=len(done) == len(names))
                for at in due:
                    names[at] = self._submit(questions[at])
                leaving = {names[at]: leaves_s for at in due if (leaves_s := questions[at].leaves_s) is not None}
                done |= self._abort(leaving)
                if len(done) == len(names):
                    continue  # the engine would be waited for in vain
                outputs = self.engine.step()
                steps += 1
                now = time.perf_counter()
                first = [self.live[out.request_id] for out in outputs if self.live[out.request_id].ttft_s is None]
                for live in first:
                    live.ttft_s = now - live.began
                if len(first) == 1:  # vLLM counts sources per step: two requests could not be told apart
                    first[0].local, first[0].external = self.counts.local, self.counts.external
                for out in outputs:
                    if out.finished:
                        done[out.request_id] = _answer(out, self.live[out.request_id], now)
            return [done[names[at]] for at in range(len(questions))]
        finally:
            self.live.clear()

    def _submit(self, question: Question) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.asked += 1
        name = str(self.asked)
        prompt = {"prompt" if isinstance(question.prompt, str) else "prompt_token_ids": question.prompt}
        if question.salt is not None:
            prompt["cache_salt"] = question.salt
        chosen = {"temperature": 0.0, "ignore_eos": True, "max_tokens": question.max_tokens} | question.sampling
        params = SamplingParams(output_kind=RequestOutputKind.CUMULATIVE, **chosen)
        self.live[name] = Live(time.perf_counter())
        lora = _lora(question.adapter) if question.adapter is not None else None
        self.engine.add_request(name, prompt, params, lora_request=lora)
        return name

    def _abort(self, leaving: dict[str, float]) -> dict[str, Answer]:
        """Aborts these requests, each `leaving` seconds after it came. The engine runs in a process of its own and goes
        on while this one sleeps; its messages wait."""
        left = {}
        for when, name in sorted((self.live[name].began + leaves_s, name) for name, leaves_s in leaving.items()):
            time.sleep(max(0.0, when - time.perf_counter()))
            self.engine.abort_request([name])
            left[name] = _unanswered(self.live[name], time.perf_counter())
        return left

    def metrics(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for metric in self.engine.get_metrics():
            value = getattr(metric, "value", None)  # histograms and vectors have none
            if isinstance(value, (int, float)):
                values[metric.name] = values.get(metric.name, 0.0) + value
        return values

    def obey(self, command: Command) -> Reply:
        match command:
            case AskAll(questions):
                return Answers(self.ask(questions))
            case LoadAdapter(adapter, in_place):
                return CommandDone(bool(self.engine.add_lora(_lora(adapter, in_place))))
            case ResetPrefixCache(connector):
                return CommandDone(bool(self.engine.reset_prefix_cache(reset_connector=connector)))
            case Nap():
                self.engine.sleep(1)
                return CommandDone(bool(self.engine.wake_up()))
            case GetMetrics():
                return Metrics(self.metrics())
            case Shutdown():
                self.engine.engine_core.shutdown()
                return CommandDone()


def _lora(adapter: tuple[str, int, str], in_place: bool = False) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(*adapter, load_inplace=in_place)


def _answer(out: Any, live: Live, now: float) -> Answer:
    completion = out.outputs[0]
    logprobs = margins = None
    if completion.logprobs is not None:
        steps = list(zip(completion.logprobs, completion.token_ids, strict=True))
        logprobs = [at[token].logprob for at, token in steps]
        if all(len(at) > 1 for at, _ in steps):
            margins = [at[token].logprob - _next_best(at, token) for at, token in steps]
    return Answer(
        ttft_s=live.ttft_s if live.ttft_s is not None else now - live.began,
        total_s=now - live.began,
        prompt_tokens=len(out.prompt_token_ids),
        token_ids=list(completion.token_ids),
        text=completion.text,
        finish_reason=completion.finish_reason,
        cached_tokens=out.num_cached_tokens or 0,
        local_tokens=live.local,
        external_tokens=live.external,
        kv_transfer_params=out.kv_transfer_params,
        logprobs=logprobs,
        margins=margins,
    )


def _next_best(logprobs: dict[int, Any], token: int) -> float:
    return float(max(other.logprob for at, other in logprobs.items() if at != token))


def _unanswered(live: Live, now: float) -> Answer:
    spent = now - live.began
    return Answer(spent, spent, 0, [], "", "abort", 0, None, None)


def serve(arguments: dict[str, Any], commands: BinaryIO, replies: BinaryIO) -> None:
    """Starts the engine and obeys until `Shutdown`."""
    import vllm

    def say(reply: Reply) -> None:
        replies.write(msgspec.json.encode(reply, enc_hook=repr) + b"\n")
        replies.flush()

    session = EngineSession.start(arguments)
    cache = session.engine.vllm_config.cache_config  # as vLLM has decided by now
    pages = cache.num_gpu_blocks - 1  # one is its null block
    say(EngineReady(vllm.__version__, cache.block_size, pages, cache.enable_prefix_caching))
    decoder = msgspec.json.Decoder(Command)
    for line in commands:
        command = decoder.decode(line)
        try:
            say(session.obey(command))
        except Exception as error:  # noqa: BLE001 - the driver decides what a failed command means
            say(CommandFailed(f"{type(error).__name__}: {error}"))
        if isinstance(command, Shutdown):
            return


def _end_with_driver() -> None:
    """Waits until no process holds the other end of standard input, then ends every process of the engine."""
    poll = select.poll()
    poll.register(0, 0)  # no event but the hang-up; the commands are read elsewhere
    poll.poll()
    own = os.getpid()
    if os.getsid(0) == own:  # or the session would be that of a person's terminal
        for pid in session_members(own):
            if pid != own and not is_tracker(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    os._exit(1)


def main() -> None:
    threading.Thread(target=_end_with_driver, name="driver-watch", daemon=True).start()
    replies = os.fdopen(os.dup(1), "wb")  # not inheritable: the engine's processes must not hold it open
    os.dup2(2, 1)
    serve(msgspec.json.decode(sys.argv[1]), sys.stdin.buffer, replies)


if __name__ == "__main__":  # vLLM's processes import this module again
    main()
