"""What the well's log says of the hierarchy's events."""

from __future__ import annotations

import logging

import pytest

from stepwell import events as e
from stepwell.log import RateLimited
from stepwell.serve import voice
from stepwell.serve.voice import log_event


def test_a_tier_that_does_not_answer_is_told_of_and_not_with_every_request(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(voice, "_limited", RateLimited(voice.log))
    with caplog.at_level(logging.INFO):
        log_event(e.RunAnswered(0, 0, 4, "never_seen"))
        assert not caplog.records
        for _ in range(3):
            log_event(e.RunAnswered(0, 0, 4, "tier_down"))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "SW-507" in caplog.text
