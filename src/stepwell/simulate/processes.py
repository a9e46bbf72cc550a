"""Work in forked processes of this machine, which share what they are forked with and end with whoever forked them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from stepwell.errors import CapacityError

Shared = TypeVar("Shared")
Task = TypeVar("Task")
Answer = TypeVar("Answer")

_PR_SET_PDEATHSIG = 1


def each(
    processes: int, work: Callable[[Shared, Task], Answer], shared: Shared, tasks: Sequence[Task]
) -> Iterator[tuple[Task, Answer]]:
    """`work(shared, task)` for every task, as they end, in so many processes. None of them outlives this iterator:
    not if it ends, is closed or raises, and not if this process is killed, or the thread that began it ends. Raises
    CapacityError SW-205 if a process cannot be had or is lost, and what `work` raises."""
    left = iter(tasks)
    workers: dict[Connection, BaseProcess] = {}
    busy: dict[Connection, Task] = {}

    def give(connection: Connection) -> None:
        for task in left:
            busy[connection] = task
            with suppress(ConnectionError):  # it is lost: there is no answer, and that is noticed then
                connection.send(task)
            return

    try:
        for _ in range(min(processes, len(tasks))):
            connection, worker = _begun(work, shared)
            workers[connection] = worker
            give(connection)
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                task = busy.pop(ready)
                answer = _answer(ready, workers[ready])
                give(ready)
                yield task, answer
    finally:
        for worker in workers.values():
            worker.kill()  # it has nothing to put in order, and may have long to go
        for connection, worker in workers.items():
            worker.join()
            connection.close()


def _begun(work: Callable[[Any, Any], object], shared: object) -> tuple[Connection, BaseProcess]:
    fork = multiprocessing.get_context("fork")  # so that `shared`, which may be large, is not copied
    try:
        ours, theirs = fork.Pipe()
        worker = fork.Process(target=_serve, args=(theirs, os.getpid(), work, shared), daemon=True)
        worker.start()
    except OSError as error:
        raise _lost("a process of the sweep cannot be started", str(error)) from None
    theirs.close()  # the worker alone has it now: when it ends, the pipe does
    return ours, worker


def _serve(connection: Connection, parent: int, work: Callable[[Any, Any], object], shared: object) -> None:
    # Forked later, others have our parent's end of this pipe too, so it would not tell that the parent has ended.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it had ended before we asked
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of a terminal's processes; the parent ends us
    while True:
        task = connection.recv()
        try:
            connection.send((work(shared, task), None))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the parent's
            error.add_note(traceback.format_exc())
            connection.send((None, error))


def _answer(connection: Connection, worker: BaseProcess) -> Any:
    try:
        answer, error = connection.recv()
    except (EOFError, ConnectionError):
        worker.join()
        code = worker.exitcode or 0
        why = f"signal {-code} killed it; SIGKILL (9) is what the system sends where memory runs out"
        raise _lost(
            "a process of the sweep ended in the middle of its work", why if code < 0 else f"its exit status is {code}"
        ) from None
    if error is not None:
        raise error
    return answer


def _lost(what: str, why: str) -> CapacityError:
    return CapacityError(
        "SW-205",
        what=what,
        why=why,
        fix="ask for fewer --processes, which need less memory; with --keep FILE what is done is kept, and the same "
        "command goes on from there",
    )
