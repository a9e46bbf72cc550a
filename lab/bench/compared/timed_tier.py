"""StepwellTier that notes for how long each of its hooks keeps the scheduler's thread on a processor.

vLLM loads it in the engine's process by its module's name. The key `times` is the file that has the seconds, by hook,
once the engine has ended.
"""

from __future__ import annotations

import functools
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepwell.engines.vllm.tier import StepwellTier

HOOKS = (
    "on_new_request",
    "lookup",
    "submit_load",
    "submit_store",
    "get_finished_jobs",
    "has_pending_work",
    "on_schedule_end",
    "on_request_finished",
    "get_stats",
)


class TimedTier(StepwellTier):
    def __init__(self, *args: Any, times: str, **given: Any) -> None:
        self._times_file = Path(times)
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)
        super().__init__(*args, **given)

    def shutdown(self) -> None:
        super().shutdown()
        self._times_file.write_text(json.dumps(self._seconds), encoding="utf-8")


def _timed(name: str) -> Callable[..., Any]:
    hook = getattr(StepwellTier, name)

    @functools.wraps(hook)
    def timed(self: TimedTier, *args: Any) -> Any:
        began = time.thread_time()
        try:
            return hook(self, *args)
        finally:
            self._seconds[name].append(time.thread_time() - began)

    return timed


for _name in HOOKS:
    setattr(TimedTier, _name, _timed(_name))
