"""Host memory first, then disks."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path

import pytest
import torch

from stepwell.errors import AccessDenied, BackendDown, CapacityError, ConfigError
from stepwell.longctx.store.disk import DiskFile
from stepwell.longctx.store.file import UnnamedFile
from stepwell.longctx.store.tiers import Bounded, Tiers

from .store_kit import pages

PAGE = 4096


def failing(monkeypatch: pytest.MonkeyPatch, folder: str, code: int) -> None:
    """Writes below this folder fail from now on."""
    real = UnnamedFile.write
    where: dict[int, Path] = {}
    made = UnnamedFile.__init__

    def watch(file: UnnamedFile, directory: Path, direct: bool) -> None:
        made(file, directory, direct)
        where[id(file)] = directory

    def write(file: UnnamedFile, data: memoryview, offset: int) -> None:
        if where[id(file)].name == folder:
            raise OSError(code, os.strerror(code))
        real(file, data, offset)

    monkeypatch.setattr(UnnamedFile, "__init__", watch)
    monkeypatch.setattr(UnnamedFile, "write", write)


def test_host_first_then_the_disk_with_the_most_room(tmp_path: Path) -> None:
    with closing(Tiers(PAGE, "12KiB", f"{tmp_path}/a:16K,{tmp_path}/b:20K")) as tiers:
        content = pages(12, PAGE)
        first = tiers.put(content[:5])
        assert tiers.on_disk(first).tolist() == [False] * 3 + [True] * 2
        assert tiers.bytes_by_tier() == {"host": 3 * PAGE, "disk": 2 * PAGE}
        assert [store.room for store in tiers._stores] == [0, 4, 3]
        rest = tiers.put(content[5:])
        assert tiers.room == 0
        order = torch.tensor([11, 0, 7, 7, 3, 1])
        assert torch.equal(tiers.get(torch.cat([first, rest])[order]), content[order])


def test_what_does_not_fit_in_all_leaves_nothing(tmp_path: Path) -> None:
    with closing(Tiers(PAGE, 2 * PAGE, f"{tmp_path}:8KiB")) as tiers:
        places = tiers.put(content := pages(1, PAGE))
        with pytest.raises(CapacityError, match="SW-209"):
            tiers.put(pages(4, PAGE))
        assert tiers.bytes_by_tier() == {"host": PAGE, "disk": 0}
        assert torch.equal(tiers.get(places), content)


def test_a_full_filesystem_leaves_it_to_the_next_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "a", errno.ENOSPC)
    with closing(Tiers(PAGE, None, f"{tmp_path}/a:1M,{tmp_path}/b:16K")) as tiers:
        places = tiers.put(content := pages(4, PAGE))
        assert torch.equal(tiers.get(places), content)
        with pytest.raises(CapacityError, match="SW-209"):
            tiers.put(content)
        assert tiers.bytes_by_tier() == {"disk": 4 * PAGE}


def test_a_broken_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "a", errno.EIO)
    with closing(Tiers(PAGE, PAGE, f"{tmp_path}/a:1M")) as tiers:
        with pytest.raises(BackendDown, match="SW-508"):
            tiers.put(pages(2, PAGE))
        assert tiers.bytes_by_tier() == {"host": 0, "disk": 0}


def test_places_and_sizes_as_people_write_them(tmp_path: Path) -> None:
    whole = os.statvfs(tmp_path)
    with closing(Tiers(PAGE, None, [f"{tmp_path}/new/folder:50%"])) as tiers:
        assert tiers.room == whole.f_blocks * whole.f_frsize // 2 // PAGE
    with closing(Tiers(PAGE, None)) as none, pytest.raises(CapacityError):
        none.put(pages(1, PAGE))
    for host, disk in (("much", None), ("1G", "relative:1G"), ("1G", f"{tmp_path}:0")):
        with pytest.raises(ConfigError, match="SW-102"):
            Tiers(PAGE, host, disk)


def test_nothing_stays_open_when_one_place_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(AccessDenied, match="SW-608") as raised:
        Tiers(PAGE, PAGE, f"{tmp_path}/good:1M,{tmp_path}/file:1M")
    assert raised.tb is not None  # which keeps all that was made alive
    assert set(os.listdir("/proc/self/fd")) <= before, "what other tests have left may go meanwhile"


def test_each_tier_can_be_wrapped(tmp_path: Path) -> None:
    seen: list[tuple[str, type]] = []

    def wrap(tier: str, store: Bounded) -> Bounded:
        seen.append((tier, type(store)))
        return store

    Tiers(PAGE, PAGE, f"{tmp_path}:1M", wrap=wrap).close()
    assert [tier for tier, _ in seen] == ["host", "disk"]
    assert seen[1][1] is DiskFile
