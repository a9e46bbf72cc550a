"""Log lines for events of the hierarchy: engines that come and go, and trouble. Events of blocks are only counted."""

from __future__ import annotations

import logging

from stepwell import events as e
from stepwell.errors import IdentityMismatch
from stepwell.log import RateLimited

log = logging.getLogger("stepwell.serve")
_limited = RateLimited(log)
_switched = RateLimited(log, 5.0)  # an operator looks at each, a script may be wrong


def alarm(tag: bytes, excess: float) -> IdentityMismatch:
    """The alarm for a namespace in quarantine."""
    return IdentityMismatch(
        "SW-406",
        what=f"namespace {tag.hex()} is in quarantine: its blocks are dropped, nothing of it is recalled or spilled",
        why="two canaries have shown that its engines do not compute what is stored, by "
        f"{excess:.3g} times what rounding explains: it has blocks of other weights",
        fix="give each set of weights a weights_id of its own, or none, and reset the connector's cache when weights "
        f"change in memory; then `stepwell cache clear --namespace {tag.hex()}` lifts the quarantine",
    )


def log_event(event: e.Event) -> None:
    """A sink for the hierarchy's events."""
    match event:
        case e.SessionOpened(session, label, ranks):
            log.info("session %d opened: %s, %d rank(s)", session, label, ranks)
        case e.SessionEnded(session, quarantined):
            log.info("session %d ended, %d slots in quarantine", session, quarantined)
        case e.MessageRefused(session, code, what):
            _limited.log(logging.WARNING, f"refused-{code}", "session %d is ended: %s [%s]", session, what, code)
        case e.TierRecovered(tier, blocks, seconds, kept) if blocks or kept:
            log.info("%s tier: %d blocks of an earlier life found in %.2f s", tier, blocks, seconds)
            if kept:
                log.warning(
                    "%s tier: %d segments cannot be read: their keys are not in the keyring, or they are of another"
                    " version, have blocks of a later release or are damaged (`stepwell cache fsck DIR` says which)."
                    " They are kept and take room: restore the keyring, or delete them with"
                    " `stepwell cache clear --tier %s` [SW-507]",
                    *(tier, kept, tier),
                )
        case e.BlockNotRead(tier, "unknown"):
            _limited.log(
                logging.WARNING,
                f"{tier}-unknown",
                "%s tier: a block that was asked for is of a later release: it is kept, with its segment, and computed"
                " again. Return to that release, or delete all with `stepwell cache clear --tier %s` [SW-507]",
                *(tier, tier),
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
        case e.CanaryHeard(excess) if excess > 1:
            _limited.log(
                logging.WARNING,
                "canary",
                "a stored block was computed again and differs by %.3g times what rounding explains [SW-406]",
                excess,
            )
        case e.NamespaceQuarantined(tag, excess):
            log.error("%s", alarm(tag, excess))
        case e.QuarantineLifted(tag):
            log.info("namespace %s has left quarantine: it was cleared", tag.hex())
        case e.PauseChanged(kind, True, uid, reason):
            _switched.log(
                logging.WARNING,
                f"{kind}-paused",
                "%s are paused by user %d%s; `stepwell resume %s` undoes it",
                *(kind, uid, _because(reason), kind),
            )
        case e.PauseChanged(kind, False, uid, _):
            _switched.log(logging.WARNING, f"{kind}-resumed", "%s are resumed by user %d", kind, uid)
        case e.ArenaTroubled(error):
            _limited.log(logging.WARNING, "arena", "%s", error)
        case _:
            pass


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""
