"""The tiers that a well makes of its settings, and what its log says of the disk's directories at the start."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from stepwell.config import Settings
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.io.clock import MonotonicClock
from stepwell.serve import storage
from stepwell.serve.executor import Wakeup
from stepwell.serve.storage import make_storage, take_sites, warn_of_space
from stepwell.vault.keyring import Keyring


def said(tmp_path: Path, caplog: pytest.LogCaptureFixture, *sizes: str) -> str:
    settings = Settings.model_validate({"disk": [f"{tmp_path / str(n)}:{size}" for n, size in enumerate(sizes)]})
    with caplog.at_level(logging.WARNING):
        sites = take_sites(settings)
        warn_of_space(settings, sites)
        for site in sites:
            site.files.close()
    return caplog.text


def test_directories_that_want_more_than_their_filesystem_has_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each would be allowed alone."""
    text = said(tmp_path, caplog, "60%", "70%")
    assert f"{tmp_path / '0'} and {tmp_path / '1'}" in text and "SW-507" in text and "disk_reserve" in text


def test_sizes_that_fit_are_not_talked_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert "SW-507" not in said(tmp_path, caplog, "64MiB", "64MiB")


def test_a_filesystem_without_o_direct_is_used_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = storage.take

    def buffered(*args):  # type: ignore[no-untyped-def]
        site = taken(*args)
        site.files.direct = False
        return site

    monkeypatch.setattr(storage, "take", buffered)
    text = said(tmp_path, caplog, "64MiB")
    assert text.count("takes no O_DIRECT") == 1 and str(tmp_path / "0") in text


def test_a_directory_on_an_overlay_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "filesystem", lambda path: "overlay")
    text = said(tmp_path, caplog, "64MiB")
    assert text.count("is on an overlay") == 1 and "SW-507" in text


@pytest.mark.parametrize("directories", [0, 2])
def test_each_tier_has_threads_and_enough_reads_to_keep_them_busy(tmp_path: Path, directories: int) -> None:
    disk = [f"{tmp_path / str(n)}:64MiB" for n in range(directories)]
    settings = Settings.model_validate({"disk": disk, "disk_threads": 3})
    sealing, wakeup = Sealing(Keyring.ephemeral(), sealed=True, wall=lambda: 1.0), Wakeup()
    made = make_storage(settings, take_sites(settings), wakeup, MonotonicClock(), sealing)
    try:
        assert [tier.name for tier in made.tiers] == ["disk"][: len(disk)]
        assert made.readers == 2 * 3 * directories
        made.add_threads(wakeup, 2)
        assert len(made.executors) == 2 * (len(made.tiers) + 1), "those that read, and those that do all else"
        assert made.readers == max(4, 2 * 3 * directories), "of a tier with fewer threads some reads wait"
    finally:
        assert all(executor.close(10.0) for executor in made.executors)
        for tier in made.tiers:
            tier.close()
        wakeup.close()
