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
        case e.TierRecovered(tier, blocks, seconds, kept) if blocks or kept:
            log.info("%s tier: %d blocks of an earlier life found in %.2f s", tier, blocks, seconds)
            if kept:
                log.warning(
                    "%s tier: %d segments cannot be read: their keys are not in the keyring, or they are of another"
                    " version or damaged (`stepwell fsck DIR` tells). They are kept and take room: restore the keyring,"
                    " or `stepwell clear --tier %s` deletes them [SW-507]",
                    *(tier, kept, tier),
                )
        case e.TierBreakerMoved(tier, operation, "open", why):
            _limited.log(
                logging.WARNING,
                f"{tier}-{operation}-open",
                "%s tier: no %ss for now: %s [SW-507]",
                *(tier, operation, why),
            )
        case e.TierBreakerMoved(tier, operation, "closed", why):
            log.info("%s tier: %ss as usual: %s", tier, operation, why)
        case e.ArenaTroubled(error):
            _limited.log(logging.WARNING, "arena", "%s", error)
        case _:
            pass
