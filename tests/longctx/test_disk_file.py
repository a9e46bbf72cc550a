"""The file of cold pages: whoever has the disk can only break it, and what breaks is told and never used."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from stepwell.errors import AccessDenied, BackendDown, CapacityError, IntegrityError
from stepwell.longctx.store.disk import LONGEST, DiskFile, runs, shares
from stepwell.longctx.store.file import UnnamedFile
from stepwell.testing.mounts import mount, unmount

from .store_kit import pages

EXTENT = 4096


class Watched(UnnamedFile):
    """A real file that fails when told to, and tells what was asked of it."""

    def __init__(self, directory: Path, direct: bool) -> None:
        super().__init__(directory, direct)
        self.calls: list[tuple[str, int, int]] = []
        self.before: Callable[[str, int, int], None] = lambda *_: None
        self.ends = 1 << 62

    def _note(self, call: str, offset: int, nbytes: int) -> None:
        self.calls.append((call, offset, nbytes))
        self.before(call, offset, nbytes)

    def read(self, into: memoryview, offset: int) -> int:
        self._note("read", offset, len(into))
        return min(super().read(into, offset), max(0, self.ends - offset))

    def write(self, data: memoryview, offset: int) -> None:
        self._note("write", offset, len(data))
        super().write(data, offset)

    def reserve(self, offset: int, nbytes: int) -> None:
        self._note("reserve", offset, nbytes)
        super().reserve(offset, nbytes)


class Store(DiskFile):
    def __init__(self, folder: Path, capacity: int = 16, page_bytes: int = EXTENT, threads: int = 2) -> None:
        self.files: list[Watched] = []
        extent = -(-page_bytes // EXTENT) * EXTENT
        super().__init__(folder, page_bytes, capacity * extent, threads=threads, open_file=self._open)

    def _open(self, folder: Path, direct: bool) -> Watched:
        self.files.append(Watched(folder, direct))
        return self.files[0]

    @property
    def raw(self) -> Path:
        """As somebody else might get at it."""
        return Path(f"/proc/self/fd/{self.files[0].fd}")

    def fail(self, call: str, code: int, *, beyond: int = 0) -> None:
        def raising(made: str, offset: int, nbytes: int) -> None:
            if made == call and offset + nbytes > beyond:
                raise OSError(code, os.strerror(code))

        self.files[0].before = raising


def write_at(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def refused(store: DiskFile, places: torch.Tensor) -> None:
    for place in places:
        with pytest.raises(IntegrityError, match="SW-305"):
            store.get(place[None])


@pytest.mark.parametrize("page_bytes", [4096, 4000, 300])
def test_any_flipped_bit_is_found(tmp_path: Path, page_bytes: int) -> None:
    with closing(DiskFile(tmp_path, page_bytes, 4 * 4096, open_file=Watched)) as store:
        content = pages(3, page_bytes)
        places = store.put(content)
        raw = Path(f"/proc/self/fd/{store._file.fd}")
        sealed = raw.read_bytes()
        rng = np.random.default_rng(3)
        start = store.extent_bytes
        for at in [0, page_bytes - 1, *rng.integers(0, page_bytes, 30).tolist()]:
            write_at(raw, start + at, bytes([sealed[start + at] ^ 1 << int(rng.integers(8))]))
            refused(store, places[1:2])
            with pytest.raises(IntegrityError):
                store.get(places)
            assert torch.equal(store.get(places[[0, 2]]), content[[0, 2]])
            write_at(raw, start + at, sealed[start + at : start + at + 1])
        assert torch.equal(store.get(places), content)


def test_extents_that_were_exchanged_do_not_open(tmp_path: Path) -> None:
    with closing(Store(tmp_path)) as store:
        places = store.put(pages(3, EXTENT))
        sealed = store.raw.read_bytes()
        write_at(store.raw, 0, sealed[EXTENT : 2 * EXTENT] + sealed[:EXTENT])
        refused(store, places[:2])
        store.get(places[2:])


def test_an_extent_of_an_earlier_write_does_not_open(tmp_path: Path) -> None:
    with closing(Store(tmp_path)) as store:
        content = pages(2, EXTENT)
        places = store.put(content)
        earlier = store.raw.read_bytes()[: 2 * EXTENT]
        store.free(places)
        again = store.put(content)  # the very same bytes, at the same places
        assert torch.equal(again, places)
        write_at(store.raw, 0, earlier)
        refused(store, again)


def test_nothing_in_the_file_is_in_clear_and_no_nonce_is_used_twice(tmp_path: Path) -> None:
    with closing(Store(tmp_path, capacity=17)) as store:
        content = torch.full((16, EXTENT), 7, dtype=torch.uint8)
        kept = store.put(content[:1])  # the file keeps its bytes as long as there is a page
        seen = set()
        for failing in (False, True, False):
            store.files[0].before = lambda *_: None
            if failing:
                store.fail("write", errno.EIO, beyond=8 * EXTENT)
                with pytest.raises(BackendDown):
                    store.put(content)
            else:
                store.free(store.put(content))
            sealed = store.raw.read_bytes()
            assert bytes([7]) * 16 not in sealed
            seen |= {sealed[at : at + EXTENT] for at in range(EXTENT, 17 * EXTENT, EXTENT)}
        assert len(seen) >= 2 * 16
        store.free(kept)
        assert store.raw.read_bytes() == b""
        store.put(content)
        sealed = store.raw.read_bytes()
        assert not seen & {sealed[at : at + EXTENT] for at in range(0, 16 * EXTENT, EXTENT)}
        assert store._writes == 1 + 4 * 16


def test_the_disk_is_full(tmp_path: Path) -> None:
    """Found out before a byte is written; all earlier pages are there, and a smaller request still fits."""
    with closing(Store(tmp_path)) as store:
        store.fail("reserve", errno.ENOSPC, beyond=6 * EXTENT)
        content = pages(4, EXTENT)
        places = store.put(content)
        asked = len(store.files[0].calls)
        with pytest.raises(CapacityError, match=r"No space left.*SW-209"):
            store.put(pages(8, EXTENT))
        assert {call for call, *_ in store.files[0].calls[asked:]} == {"reserve"}
        assert store.room == 12
        assert torch.equal(store.get(places), content)
        more = pages(2, EXTENT)
        assert torch.equal(store.get(store.put(more)), more)
        with pytest.raises(CapacityError):
            store.put(pages(1, EXTENT))
        store.free(places)
        assert torch.equal(store.get(store.put(content)), content)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_the_disk_is_full_only_when_it_is_written(tmp_path: Path, code: int) -> None:
    """As on filesystems that copy on write, or cannot reserve."""
    with closing(Store(tmp_path)) as store:
        content = pages(4, EXTENT)
        places = store.put(content)
        store.fail("write", code)
        with pytest.raises(CapacityError, match="SW-209"):
            store.put(pages(3, EXTENT))
        assert store.bytes_by_tier() == {"disk": 4 * EXTENT}
        assert torch.equal(store.get(places), content)


def test_a_real_filesystem_is_full(tmp_path: Path) -> None:
    try:
        mount("none", tmp_path, "tmpfs", "size=64k")
    except OSError as error:
        pytest.skip(str(error))
    try:
        with closing(DiskFile(tmp_path, EXTENT, 1 << 30)) as store:
            content = pages(8, EXTENT)
            places = store.put(content)
            with pytest.raises(CapacityError, match="SW-209"):
                store.put(pages(20, EXTENT))
            assert torch.equal(store.get(places), content)
            store.put(pages(4, EXTENT))
    finally:
        unmount(tmp_path)


def test_the_disk_fails(tmp_path: Path) -> None:
    with closing(Store(tmp_path)) as store:
        content = pages(4, EXTENT)
        places = store.put(content)
        store.fail("read", errno.EIO)
        with pytest.raises(BackendDown, match=r"cannot be read.*SW-508"):
            store.get(places)
        store.fail("write", errno.EIO)
        with pytest.raises(BackendDown, match=r"cannot be written.*SW-508"):
            store.put(content)
        assert store.room == 12
        assert torch.equal(store.get(places), content)


def test_the_file_is_shorter_than_it_was(tmp_path: Path) -> None:
    with closing(Store(tmp_path)) as store:
        places = store.put(pages(4, EXTENT))
        store.files[0].ends = 4 * EXTENT - 1
        refused(store, places[3:])
        store.get(places[:3])
        os.truncate(store.raw, 0)
        refused(store, places)


def open_fds() -> set[str]:
    gc.collect()
    return set(os.listdir("/proc/self/fd"))


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    before = open_fds()
    store = Store(tmp_path / "new" / "folder")
    store.put(pages(2, EXTENT))
    assert os.listdir(tmp_path / "new" / "folder") == []
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o777 == 0o700
    store.fail("read", errno.EIO)
    with pytest.raises(BackendDown):
        store.get(torch.tensor([0]))
    store.close()
    assert open_fds() == before
    forgotten = Store(tmp_path)
    forgotten.put(pages(2, EXTENT))
    del forgotten
    assert open_fds() == before
    with pytest.raises(ValueError, match="for 0 threads"):
        DiskFile(tmp_path, 1, 1, threads=0)
    (tmp_path / "file").touch()
    with pytest.raises(AccessDenied, match="SW-608"):
        DiskFile(tmp_path / "file", EXTENT, EXTENT)
    assert open_fds() == before


def test_without_unnamed_files_the_name_is_gone_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def old(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no unnamed files")
        assert mode == 0o600
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", old)
    with closing(Store(tmp_path)) as store:
        assert os.listdir(tmp_path) == []
        content = pages(2, EXTENT)
        assert torch.equal(store.get(store.put(content)), content)


def test_the_page_cache_where_it_must_be(tmp_path: Path) -> None:
    with closing(DiskFile(tmp_path, 300, 3000)) as small:
        assert (small.direct, small.extent_bytes) == (False, 300)
    with closing(DiskFile(tmp_path, 4000, 1, open_file=lambda folder, _: UnnamedFile(folder, False))) as refusing:
        assert (refusing.direct, refusing.extent_bytes) == (False, 4000)


def test_a_forked_child_may_not_use_it(tmp_path: Path) -> None:
    with closing(Store(tmp_path)) as store:
        content = pages(1, EXTENT)
        places = store.put(content)
        child = os.fork()
        if child == 0:
            try:
                store.put(content)
            except ValueError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert torch.equal(store.get(places), content)


def test_closing_waits_for_who_is_reading(tmp_path: Path) -> None:
    store = Store(tmp_path)
    content = pages(1, EXTENT)
    places = store.put(content)
    reading, go_on, got = threading.Event(), threading.Event(), []

    def pause(*_: object) -> None:
        reading.set()
        go_on.wait()

    store.files[0].before = pause
    reader = threading.Thread(target=lambda: got.append(store.get(places)))
    closer = threading.Thread(target=store.close)
    reader.start()
    reading.wait()
    closer.start()
    try:
        closer.join(0.05)
        assert closer.is_alive()
        os.fstat(store.files[0].fd)
    finally:
        go_on.set()
        closer.join()
        reader.join()
    assert torch.equal(got[0], content)


def test_neighbours_are_read_and_written_in_one_call(tmp_path: Path) -> None:
    with closing(Store(tmp_path, capacity=100, threads=1)) as store:
        places = store.put(pages(100, EXTENT))
        calls = store.files[0].calls
        assert [call for call, *_ in calls] == ["reserve", "write"]
        calls.clear()
        store.get(places.flip(0))
        assert calls == [("read", 0, 100 * EXTENT)]
        calls.clear()
        store.get(places[[0, 5, 11, 50, 51]])  # four between, five between, many between
        assert calls == [("read", 0, 6 * EXTENT), ("read", 11 * EXTENT, EXTENT), ("read", 50 * EXTENT, 2 * EXTENT)]
        assert store.bytes_read == 109 * EXTENT


def test_runs_end_at_a_gap_and_when_they_are_long() -> None:
    offsets = np.array([0, 10, 30, 51, LONGEST, 10 + LONGEST, 2 * LONGEST, 20 + 2 * LONGEST])
    assert runs(offsets, 10, 10) == [(0, 3), (3, 4), (4, 6), (6, 8)]
    assert runs(np.arange(0, 3 * LONGEST, 10), 10, 0)[0][1] == -(-LONGEST // 10)
    assert runs(np.zeros(0, np.int64), 10, 10) == []


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_shares_hold_all_runs_in_order(threads: int) -> None:
    found = [(0, 5), (5, 6), (6, 40), (40, 41), (41, 100)]
    dealt = shares(found, 4096, threads)
    assert [run for share in dealt for run in share] == found
    assert len(dealt) <= threads
    assert shares([], 4096, threads) == []
    assert shares(found, 10, threads) == [found]  # not worth another thread
