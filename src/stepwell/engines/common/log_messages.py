"""Lines of stepwell in the engine's log: at most three at start, one for each trouble."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from stepwell.client.identity import EngineIdentity
from stepwell.errors import StepwellError
from stepwell.protocol.messages import Welcome
from stepwell.units import format_size

log = logging.getLogger("stepwell")

_OF_A_WELL_THAT_RECALLS = ("end", "never_seen", "evicted")


def adopt_engine_log(logger: str) -> None:
    """The engine configures only its own `logger`; ours speaks through the same handlers. An application that
    configured the "stepwell" logger, or the root, keeps its own."""
    configured = any(not isinstance(h, logging.NullHandler) for h in (*log.handlers, *logging.getLogger().handlers))
    engine = logging.getLogger(logger).handlers
    if configured or not engine:
        return
    for handler in engine:
        log.addHandler(handler)
    log.propagate = False
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)


def untested(engine: str, version: str, tested: Sequence[str]) -> None:
    """Warns of an engine version that was not tested. Called in the scheduler's process alone, so that it is said
    once."""
    log.warning(
        "stepwell: %s %s is not tested with this version of stepwell (%s are); what it cannot serve it leaves alone",
        engine,
        version,
        " and ".join(tested),
    )


def unverified() -> None:
    """Warns that copies on CUDA were never tested on a GPU. Called in the scheduler's process alone."""
    log.warning(
        "stepwell: copies on CUDA are unverified on GPU: they were tested with a device that imitates one's order, and"
        " never on a GPU; `make test-gpu` of stepwell's repository checks them on yours"
    )


def joined(welcome: Welcome, who: EngineIdentity) -> None:
    log.info(
        "stepwell: joined well %s, host %s, model %s in blocks of %d tokens (%s a rank)",
        welcome.well,
        format_size(welcome.host_bytes),
        who.label,
        who.block_tokens,
        format_size(who.shard_bytes),
    )
    for warning in welcome.warnings:
        log.warning("stepwell: %s", warning)


class PauseLog:
    """Logs once when answers show that the well's operator has paused recalls, and once when they are resumed."""

    def __init__(self) -> None:
        self._paused = False

    def answered(self, reason: str) -> None:
        """A request has its answer, which ends for this reason."""
        if reason == "paused" and not self._paused:
            self._paused = True
            log.warning(
                "stepwell: the well's operator has paused recalls: requests are computed; `stepwell stats` says since"
                " when and why, `stepwell resume` undoes it"
            )
        elif reason in _OF_A_WELL_THAT_RECALLS and self._paused:
            self._paused = False
            log.warning("stepwell: recalls are resumed")


def trouble(error: StepwellError) -> None:
    """Logs trouble that leaves the engine without recalls for now."""
    level = logging.WARNING if error.code in ("SW-402", "SW-504") else logging.ERROR
    log.log(level, "stepwell: no recalls for now: %s", error)


def adapter_trouble(error: StepwellError) -> None:
    """Logs that requests with one adapter bypass stepwell; all others are served."""
    log.warning("stepwell: %s", error)


def worker_trouble(error: StepwellError) -> None:
    """Logs trouble of a worker's member. Trouble with settings, well and permissions is logged for the scheduler's
    member as well, where one line is enough."""
    if error.code[3] in "156":
        log.debug("stepwell: a worker has not joined: %s", error)
    else:
        trouble(error)
