"""What the well's log says of the hierarchy's events."""

from __future__ import annotations

import logging

import pytest

from stepwell import events as e
from stepwell.log import RateLimited
from stepwell.serve import log_messages
from stepwell.serve.log_messages import log_event


def test_a_tier_that_is_not_asked_for_now_is_told_of_and_not_every_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_messages, "_limited", RateLimited(log_messages.log))
    with caplog.at_level(logging.INFO):
        log_event(e.RunAnswered(0, 0, 4, "tier_down"))
        log_event(e.TierBreakerMoved("disk", "read", "half_open", "it is asked again"))
        assert not caplog.records
        for _ in range(3):
            log_event(e.TierBreakerMoved("disk", "read", "open", "no answer for 1 s"))
        log_event(e.TierBreakerMoved("disk", "read", "closed", "it answers"))
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "disk tier: no reads for now: no answer for 1 s [SW-507]" in caplog.text


def test_a_block_of_a_later_release_is_warned_of_and_not_every_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_messages, "_limited", RateLimited(log_messages.log))
    for reason in ("damaged", "unknown", "unknown"):
        log_event(e.BlockNotRead("disk", reason))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "of a later release" in record.getMessage() and "`stepwell cache clear --tier disk`" in record.getMessage()
