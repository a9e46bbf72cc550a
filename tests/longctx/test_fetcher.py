"""Reading beside the model: who waits is always answered."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from stepwell.errors import ConfigError
from stepwell.longctx.kv.fetch.fetcher import Fetcher
from stepwell.longctx.ledger import Ledger


@pytest.fixture
def fetcher() -> Iterator[Fetcher]:
    made = Fetcher(Ledger(), beside=True)
    yield made
    made.close()


def test_urgent_requests_overtake_early_ones_and_those_what_is_for_later(fetcher: Fetcher) -> None:
    gate, order = threading.Event(), list[str]()
    busy = fetcher.start(gate.wait)
    fetcher.later(lambda: order.append("later"), 1)
    early = fetcher.start(lambda: order.append("early"), urgent=False)
    fetcher.start(lambda: order.append("urgent"))
    gate.set()
    busy.result()
    early.result()
    fetcher.start(lambda: None, urgent=False).result()
    assert order[:2] == ["urgent", "early"]


def test_who_waits_for_what_was_not_begun_is_told_when_it_is_closed(fetcher: Fetcher) -> None:
    gate, begun = threading.Event(), threading.Event()
    busy = fetcher.start(lambda: begun.set() or gate.wait())
    begun.wait()
    queued = fetcher.start(lambda: 1)
    closing = threading.Thread(target=fetcher.close)
    closing.start()
    while not fetcher._closed:
        pass
    gate.set()
    closing.join(10)
    assert not closing.is_alive()
    assert busy.result() is True, "what was begun is waited for"
    with pytest.raises(ConfigError, match="SW-133"):
        queued.result()


def test_nothing_is_begun_behind_its_end(fetcher: Fetcher) -> None:
    fetcher.close()
    fetcher.close()
    with pytest.raises(ConfigError, match="SW-133"):
        fetcher.start(lambda: 1)
    done: list[int] = []
    fetcher.later(lambda: done.append(1), 1)
    assert done == [1], "what is to be stored is not lost"


def test_what_reading_raised_is_raised_where_it_is_asked_for(fetcher: Fetcher) -> None:
    def broken() -> None:
        raise OSError("gone")

    found = fetcher.start(broken)
    with pytest.raises(OSError, match="gone"):
        found.result()
    assert fetcher.start(lambda: 2).result() == 2
