"""Work in forked processes of this machine, which share the parent's memory at the fork and end with the parent."""

from __future__ import annotations

import multiprocessing
import os
import selectors
import signal
import socket
import traceback
from collections.abc import Callable, Generator
from contextlib import suppress
from multiprocessing.process import BaseProcess

from stepwell.errors import CapacityError
from stepwell.io.process.parent import end_with_parent

Work = Callable[[int], bytes]

MAX_BYTES = 1 << 16
"""Largest answer in bytes: each is one message of a socket."""

_DONE, _FAILED = b"+", b"-"


def each(processes: int, work: Work, tasks: int) -> Generator[tuple[int, bytes], None, None]:
    """`work(task)` for every task from 0 on, as they end, in so many processes. None of them outlives this generator:
    not if it ends, is closed or raises, and not if this process is killed, or the thread that began it ends. Raises
    CapacityError SW-205 if a process cannot be had or is lost, and RuntimeError with the story of what `work` raised.
    """
    left = iter(range(tasks))
    workers: dict[socket.socket, BaseProcess] = {}
    busy: dict[socket.socket, int] = {}

    def give(pipe: socket.socket) -> None:
        for task in left:
            busy[pipe] = task
            with suppress(ConnectionError):  # it is lost: there is no answer, and that is noticed then
                pipe.send(task.to_bytes(8, "big"))
            return

    with selectors.DefaultSelector() as selector:
        try:
            for _ in range(min(processes, tasks)):
                pipe, worker = _begun(work)
                workers[pipe] = worker
                selector.register(pipe, selectors.EVENT_READ)
                give(pipe)
            while busy:
                for key, _ in selector.select():
                    pipe = key.fileobj  # type: ignore[assignment]
                    if pipe not in busy:
                        selector.unregister(pipe)  # it has nothing to do any more, and has ended
                        continue
                    task = busy.pop(pipe)
                    answer = _answer(pipe, workers[pipe])
                    give(pipe)
                    yield task, answer
        finally:
            for worker in workers.values():
                worker.kill()  # it has nothing to put in order, and may have long to go
            for pipe, worker in workers.items():
                worker.join()
                pipe.close()


def _begun(work: Work) -> tuple[socket.socket, BaseProcess]:
    fork = multiprocessing.get_context("fork")  # so that what `work` needs, which may be large, is not copied
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        worker = fork.Process(target=_serve, args=(theirs, os.getpid(), work), daemon=True)
        worker.start()
    except OSError as error:
        raise _lost("a process of the sweep cannot be started", str(error)) from None
    theirs.close()  # the worker alone has it now: when it ends, the pipe does
    return ours, worker


def _serve(pipe: socket.socket, parent: int, work: Work) -> None:
    # Forked later, others have our parent's end of this pipe too, so it would not tell that the parent has ended.
    end_with_parent()
    if os.getppid() != parent:  # it had ended before we asked
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of a terminal's processes; the parent ends us
    while task := pipe.recv(8):
        try:
            answer = _DONE + work(int.from_bytes(task, "big"))
        except Exception:  # noqa: BLE001 - whatever it is, it is the parent's
            answer = _FAILED + traceback.format_exc().encode(errors="backslashreplace")[-MAX_BYTES:]
        assert len(answer) <= len(_DONE) + MAX_BYTES
        pipe.send(answer)


def _answer(pipe: socket.socket, worker: BaseProcess) -> bytes:
    with suppress(ConnectionError):
        if answer := pipe.recv(len(_DONE) + MAX_BYTES):
            if answer[:1] == _FAILED:
                raise RuntimeError(f"in a process of the sweep:\n{answer[1:].decode(errors='replace')}")
            return answer[1:]
    worker.join()
    code = worker.exitcode or 0
    why = f"signal {-code} killed it; SIGKILL (9) is what the system sends where memory runs out"
    raise _lost(
        "a process of the sweep ended in the middle of its work", why if code < 0 else f"its exit status is {code}"
    )


def _lost(what: str, why: str) -> CapacityError:
    return CapacityError(
        "SW-205",
        what=what,
        why=why,
        fix="ask for fewer --processes, which need less memory; with --keep FILE what is done is kept, and the same "
        "command goes on from there",
    )
