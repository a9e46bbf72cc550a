"""What the well's log tells of the hierarchy: engines that come and go, and trouble. Blocks are for the statistics."""

from __future__ import annotations

import logging

from stepwell import events as e
from stepwell.log import RateLimited

log = logging.getLogger("stepwell.serve")
_limited = RateLimited(log)


def log_event(event: e.Event) -> None:
    """A sink for the hierarchy's events."""
    match event:
        case e.SessionOpened(session, label, ranks):
            log.info("session %d opened: %s, %d rank(s)", session, label, ranks)
        case e.SessionEnded(session, quarantined):
            log.info("session %d ended, %d slots in quarantine", session, quarantined)
        case e.TierRecovered(tier, blocks, seconds) if blocks:
            log.info("%s tier: %d blocks of an earlier life found in %.2f s", tier, blocks, seconds)
        case e.ArenaTroubled(error):
            _limited.log(logging.WARNING, "arena", "%s", error)
        case _:
            pass
