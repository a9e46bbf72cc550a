"""Drives a real vLLM in processes of its own: start, ask, kill, close.

Used by the demo, the end-to-end tests and the benchmarks. It measures nothing itself: the engine process takes the
times (`engine_main`), so that pipes and this process's scheduling are not in them. One thread at a time may use an
`EngineProcess`, except `kill`, which may come from any. The engine's processes form one session of the system, by which
`kill` finds them all; a well that a connector started is detached from it and survives.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec

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

# One OpenMP thread: two on a busy machine spin at each other's barriers, and numba, which drafts n-grams, would bring
# more. No network, no usage reports.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
START_LIMIT_S = 300.0
ASK_LIMIT_S = 300.0
CLOSE_LIMIT_S = 20.0
TRACKER_LIMIT_S = 5.0

_R = TypeVar("_R", EngineReady, Answers, Metrics, CommandDone)


class EngineFailed(Exception):
    """The engine did not start, ended, refused or did not answer in time: `what`, its `log`, the log's `tail`."""

    def __init__(self, what: str, log: Path) -> None:
        self.what, self.log, self.tail = what, log, log_tail(log)
        super().__init__(f"{what}; the end of {log}:\n{self.tail}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of vLLM. Sizes are in tokens (`page`, `max_model_len`) and pages (`pool_pages`, usable ones; 0: as many
    as vLLM has room for). `connector`: vLLM's KVTransferConfig as a mapping, None for plain vLLM. `extra`: further vLLM
    engine arguments, which win over ours. `env` wins over the driver's environment and `ENVIRONMENT`."""

    model: Path
    page: int
    pool_pages: int
    max_model_len: int
    connector: Mapping[str, Any] | None = None
    dtype: str = "bfloat16"
    env: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        return {
            "model": str(self.model),
            "dtype": self.dtype,
            "block_size": self.page,
            # vLLM keeps one page as its null block.
            "num_gpu_blocks_override": self.pool_pages + 1 if self.pool_pages else None,
            "max_model_len": self.max_model_len,
            "enforce_eager": True,
            "seed": 0,
            "disable_log_stats": False,
            "kv_transfer_config": dict(self.connector) if self.connector is not None else None,
            **self.extra,
        }


class EngineProcess:
    """One running vLLM, as a context manager: leaving it closes the engine, by force if need be."""

    def __init__(self, config: EngineConfig, log: Path) -> None:
        """Starts the processes and returns at once; call `wait_ready` before anything else. Appends to `log`."""
        self.log = log
        self.ready = EngineReady("", 0, 0, False)
        self._gone = False
        with log.open("ab") as log_file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stepwell.demo.engine_main", msgspec.json.encode(config.arguments()).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                env={**os.environ, **ENVIRONMENT, **config.env},
                start_new_session=True,  # Ctrl-C reaches us alone, and the session id names all of the engine
            )
        self._replies: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="engine-replies", daemon=True)
        self._reader.start()

    @classmethod
    def start(cls, config: EngineConfig, log: Path, on_wait: Callable[[float], None] | None = None) -> EngineProcess:
        """A ready engine. Raises EngineFailed after `START_LIMIT_S`, with nothing left running."""
        engine = cls(config, log)
        try:
            engine.wait_ready(on_wait)
        except BaseException:
            engine.kill()
            raise
        return engine

    @property
    def version(self) -> str:
        return self.ready.version

    def wait_ready(self, on_wait: Callable[[float], None] | None = None) -> None:
        """Waits for the engine. `on_wait` is called about once a second with the seconds waited."""
        self.ready = self._receive(EngineReady, START_LIMIT_S, on_wait)

    def ask(self, prompt: list[int] | str, max_tokens: int = 32, **sampling: Any) -> Answer:
        """Asks one question, alone in the engine."""
        return self.ask_all([Question(prompt, max_tokens, sampling=sampling)])[0]

    def ask_all(self, questions: list[Question]) -> list[Answer]:
        """Asks all questions at the same time. Raises EngineFailed if the engine ends meanwhile."""
        return self._call(AskAll(questions), Answers, ASK_LIMIT_S).answers

    def reset_prefix_cache(self, *, connector: bool = False) -> bool:
        """False if the engine declined. `connector`: the connector resets its cache, too, and nothing that it holds is
        used again."""
        return self._call(ResetPrefixCache(connector), CommandDone, ASK_LIMIT_S).ok

    def nap(self) -> None:
        """Puts the engine to sleep, as between two updates of its weights, and wakes it up. Raises EngineFailed if it
        cannot."""
        self._call(Nap(), CommandDone, ASK_LIMIT_S)

    def load_adapter(self, adapter: tuple[str, int, str], *, in_place: bool = False) -> bool:
        """The engine loads this adapter (name, number, folder) now, and not when it is first used."""
        return self._call(LoadAdapter(adapter, in_place), CommandDone, ASK_LIMIT_S).ok

    def metrics(self) -> dict[str, float]:
        return self._call(GetMetrics(), Metrics, ASK_LIMIT_S).values

    def pids(self) -> list[int]:
        """Process ids of the engine, the frontend first."""
        return session_members(self._process.pid)

    def kill(self) -> None:
        """Sends SIGKILL to all processes of the engine at once; returns when none is left. Idempotent. Only Python's
        resource trackers are left to see the others die and to remove their shared memory, as they do when an engine
        crashes; they end by themselves, or are killed too after a few seconds."""
        if self._gone:
            return  # by now the number may name another session
        session = self._process.pid
        end_session(session, lambda pid: not is_tracker(pid), TRACKER_LIMIT_S)
        end_session(session, lambda pid: True, TRACKER_LIMIT_S)
        self._process.wait()
        self._gone = True
        self._close_pipes()

    def close(self) -> None:
        """Shuts down in good order within `CLOSE_LIMIT_S`, then kills the rest. Idempotent, never raises."""
        if self._process.poll() is None:
            with contextlib.suppress(EngineFailed, subprocess.TimeoutExpired):  # then killed below
                self._call(Shutdown(), CommandDone, CLOSE_LIMIT_S)
                self._process.wait(CLOSE_LIMIT_S)
        self.kill()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:  # an answer may be outstanding, and a person who pressed Ctrl-C does not want to wait
            self.kill()

    def _call(self, command: Command, expected: type[_R], limit_s: float) -> _R:
        pipe = self._process.stdin
        assert pipe is not None
        try:
            pipe.write(msgspec.json.encode(command) + b"\n")
            pipe.flush()
        except (OSError, ValueError) as error:  # ValueError: kill() closed it
            raise self._failed("the engine has ended") from error
        return self._receive(expected, limit_s, None)

    def _receive(self, expected: type[_R], limit_s: float, on_wait: Callable[[float], None] | None) -> _R:
        began = time.monotonic()
        while True:
            try:
                line = self._replies.get(timeout=1.0)
                break
            except queue.Empty:
                waited = time.monotonic() - began
                # Processes of the engine may hold the pipe open after the frontend died: no end of file shows it.
                if self._process.poll() is not None and self._replies.empty():
                    raise self._failed(f"the engine ended with status {self._process.returncode}") from None
                if waited > limit_s:
                    raise self._failed(f"the engine did not answer within {limit_s:.0f} s") from None
                if on_wait is not None:
                    on_wait(waited)
        if line is None:
            self._replies.put(None)  # the end stays the end
            raise self._failed("the engine has ended")
        reply = msgspec.json.decode(line, type=Reply)
        if isinstance(reply, CommandFailed):
            raise self._failed(f"the engine reports {reply.message}")
        if not isinstance(reply, expected):
            raise self._failed(f"the engine answered with {type(reply).__name__} instead of {expected.__name__}")
        return reply

    def _read(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None
        with pipe:
            for line in pipe:
                self._replies.put(line)
        self._replies.put(None)

    def _close_pipes(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(OSError):  # unsent bytes to a process that is gone
            pipe.close()
        self._reader.join(TRACKER_LIMIT_S)

    def _failed(self, what: str) -> EngineFailed:
        return EngineFailed(what, self.log)


def log_tail(log: Path, lines: int = 25) -> str:
    """The last `lines` lines, from at most the last 16 KiB."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 16384))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def session_members(session: int) -> list[int]:
    """Living processes (no zombies) of this session of the system, in the order of their ids."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            # "pid (name) state ppid pgrp session ...", and the name may hold spaces and brackets
            state, _ppid, _pgrp, sid = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue  # ended meanwhile
        if int(sid) == session and state not in "ZX":
            members.append(int(entry.name))
    return sorted(members)


def is_tracker(pid: int) -> bool:
    """True for Python's resource trackers, which clean up after processes that died."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def end_session(session: int, chosen: Callable[[int], bool], limit_s: float) -> None:
    """Sends SIGKILL to the chosen members until none of them is left, then waits up to `limit_s` for the others to
    end."""
    deadline = time.monotonic() + limit_s
    while members := session_members(session):
        for pid in filter(chosen, members):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)
