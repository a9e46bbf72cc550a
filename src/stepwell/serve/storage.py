"""The tiers of a well below host memory, each with the threads that its I/O blocks; and what the log is told of them.

A tier that settings name is made here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from stepwell.config import Settings
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.io.clock import Clock
from stepwell.io.paths import OVERLAY, filesystem
from stepwell.log import RateLimited
from stepwell.serve.executor import ThreadExecutor, Wakeup
from stepwell.tiers.base import Tier
from stepwell.tiers.disk.site import take, usable_bytes
from stepwell.tiers.disk.tier import DiskTier, Site
from stepwell.units import format_size

log = logging.getLogger("stepwell.serve")
_limited = RateLimited(log)


def take_sites(settings: Settings) -> list[Site]:
    """The directories of the settings, checked and locked; all are given back if one cannot be used. Raises
    StepwellError."""
    sites: list[Site] = []
    try:
        for place in settings.disk:
            sites.append(take(place.path, place.size, settings.disk_reserve))
    except BaseException:
        for site in sites:
            site.files.close()
        raise
    for place, site in zip(settings.disk, sites, strict=True):
        free, _ = site.files.free()
        log.info("disk tier in %s: %s, %s free", place.path, format_size(site.limit), format_size(free))
        if not site.files.direct:
            log.warning("%s takes no O_DIRECT: its I/O goes through the page cache, at a higher cost", place.path)
        if filesystem(place.path) in OVERLAY:
            log.warning("%s is on an overlay: what is cached there goes with the container [SW-507]", place.path)
    return sites


def warn_of_space(settings: Settings, sites: Sequence[Site]) -> None:
    """Logs a warning for each filesystem whose directories may together grow beyond its space: they will not. It may
    block, so a job does this. Raises OSError."""
    devices = [place.path.stat().st_dev for place in settings.disk]
    for device in dict.fromkeys(devices):
        here = [(place, site) for of, place, site in zip(devices, settings.disk, sites, strict=True) if of == device]
        free, _ = here[0][1].files.free()
        wanted = sum(site.limit for _, site in here)
        usable = usable_bytes([place.path for place, _ in here], free, here[0][1].reserve)
        if wanted > usable:
            log.warning(
                "the disk tier may have %s in %s, and %s can be used there, %s being left to others (disk_reserve): it"
                " stops growing at that; lower the size or free space [SW-507]",
                format_size(wanted),
                " and ".join(str(place.path) for place, _ in here),
                format_size(usable),
                format_size(here[0][1].reserve),
            )


YIELDING = 10
"""Of threads that write to tiers: what is sealed must not keep the processors from a recall. They get at least a tenth
of a processor that others keep busy."""


@dataclass(slots=True)
class Storage:
    """`tiers`: the uppermost first. `executors` run their jobs. `readers`: batches read at the same time from each."""

    tiers: list[Tier] = field(default_factory=list)
    executors: list[ThreadExecutor] = field(default_factory=list)
    readers: int = 0

    def add_threads(self, wakeup: Wakeup, threads: int) -> tuple[ThreadExecutor, ThreadExecutor]:
        """Executors for one more tier, with so many threads each: one reads, the other does all else and yields to
        whoever needs the processors. Raises OSError where the system gives no thread."""
        readers, others = ThreadExecutor(wakeup, threads), ThreadExecutor(wakeup, threads, nice=YIELDING)
        self.executors += [readers, others]
        self.readers = max(self.readers, 2 * threads)  # so that no thread waits for us to hand it the next
        return readers, others


def make_storage(settings: Settings, sites: Sequence[Site], wakeup: Wakeup, clock: Clock, sealing: Sealing) -> Storage:
    """The tiers that the settings name; `sites` are the disk's directories. Raises OSError."""
    storage = Storage()
    if sites:
        readers, executor = storage.add_threads(wakeup, settings.disk_threads * len(sites))
        tier = DiskTier(sites, executor, clock, time.time, sealing, trouble=_log_trouble, readers=readers)
        storage.tiers.append(tier)
        executor.submit(partial(warn_of_space, settings, sites), lambda error: None)  # only for the log
    return storage


def _log_trouble(kind: str, error: BaseException) -> None:
    """Logs one line a minute and kind, however often a broken disk fails. May be called from any thread."""
    level = logging.WARNING if isinstance(error, OSError) else logging.ERROR
    _limited.log(level, f"disk-{kind}", "the disk tier could not %s: %s [SW-507]", _WHAT.get(kind, kind), error)


_WHAT = {"no_space": "take more space", "index_full": "index all that it found"}
