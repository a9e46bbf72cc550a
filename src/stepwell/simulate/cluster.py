"""Work on the processors of a Ray cluster, or of this machine by way of Ray. Needs the extra `ray`. Ray's messages are
pickles: a process that can reach the cluster can run code here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, TypeVar

from stepwell.errors import ConfigError

Shared = TypeVar("Shared")
Task = TypeVar("Task")
Answer = TypeVar("Answer")

LOCAL = "local"


def each(
    address: str, work: Callable[[Shared, Task], Answer], shared: Shared, tasks: Sequence[Task]
) -> Iterator[tuple[Task, Answer]]:
    """Runs `work(shared, task)` for every task and yields answers as they come; `shared` is sent to each node once.
    `address`: of the cluster, `auto` for the one of this machine, `local` for one that lasts as long as this. A task
    whose node is lost is done again. Raises ConfigError SW-127 without Ray or a cluster, and the exceptions of
    `work`."""
    try:
        ray: Any = import_module("ray")
    except ImportError:
        fix = "pip install 'stepwell[ray]', here and on the nodes"
        raise _unusable("ray is not installed", fix) from None
    try:
        ray.init(None if address == LOCAL else address, log_to_driver=False, logging_level="error")
    except Exception as error:  # noqa: BLE001 - what it raises is of many kinds
        reason = str(error) or type(error).__name__
        raise _unusable(reason.splitlines()[0], f"name a cluster that runs, or `{LOCAL}`") from None
    try:
        remote = ray.remote(_done)
        everywhere = ray.put(shared)
        tasks_of = {remote.remote(work, everywhere, task): task for task in tasks}
        while tasks_of:
            (ended, *_), _ = ray.wait(list(tasks_of), num_returns=1)
            yield tasks_of.pop(ended), ray.get(ended)
    finally:
        ray.shutdown()


def _done(work: Callable[[Shared, Task], Answer], shared: Shared, task: Task) -> Answer:
    return work(shared, task)


def _unusable(why: str, fix: str) -> ConfigError:
    return ConfigError("SW-127", what="the sweep cannot be spread over a Ray cluster", why=why, fix=fix)
