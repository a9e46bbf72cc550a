"""Asking home with a deadline: a filesystem may hang, and what waits for it hangs with it.

So a thread of its own asks, and is left behind if no answer comes. There is never more than one: who asks meanwhile
waits for its turn, with the same deadline.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from stepwell.client.refusal import refusal
from stepwell.errors import BackendDown

HOME_SECONDS = 2.0

T = TypeVar("T")

_turn = threading.Lock()


def within(home: Path, ask: Callable[[], T]) -> T:
    """What `ask` returns or raises, which reads in `home`. Raises BackendDown SW-514 if that has not come within
    twice HOME_SECONDS, and SW-510 if this process gets no thread."""
    turn = _turn
    if not turn.acquire(timeout=HOME_SECONDS):
        raise _hangs(home)
    answers: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            answers.append(ask())
        except BaseException as error:  # noqa: BLE001 - it is raised where it was asked
            errors.append(error)
        finally:
            turn.release()
            done.set()

    try:
        threading.Thread(target=run, name="stepwell-home", daemon=True).start()
    except (RuntimeError, MemoryError) as error:
        turn.release()
        raise refusal(error) from error
    if not done.wait(HOME_SECONDS):
        raise _hangs(home)
    try:
        if errors:
            raise errors[0]
        return answers[0]
    finally:
        errors.clear()  # with its traceback it would keep itself alive


def _hangs(home: Path) -> BackendDown:
    return BackendDown(
        "SW-514",
        what=f"home {home} does not answer",
        why=f"its filesystem hangs: nothing could be read there within {HOME_SECONDS:g} s",
        fix="name the well that runs by its socket (--socket PATH; its log and `ss -xl` have the path): it is then "
        "asked without home; or see to the filesystem",
    )


def _anew() -> None:
    """In a forked child, which has no such thread."""
    global _turn
    _turn = threading.Lock()


os.register_at_fork(after_in_child=_anew)
