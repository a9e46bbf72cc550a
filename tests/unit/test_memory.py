"""Shared memory: sealed, populated, given back, and kept from forks and core dumps. All of it real."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import mmap
import os
import re
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepwell.errors import CapacityError
from stepwell.io import staging
from stepwell.io.memory import Mapping, SharedMemory, SystemMemory

MiB = 1 << 20
NBYTES = 4 * MiB


@pytest.fixture
def shared() -> SharedMemory:
    return SystemMemory().make(NBYTES)


def _allocated(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def _maps(address: int) -> dict[str, str]:
    """The fields of this process's mapping at `address`; empty if there is none."""
    found = False
    fields: dict[str, str] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            if found:
                break
            found = int(match[1], 16) <= address < int(match[2], 16)
        elif found:
            name, _, value = line.partition(":")
            fields[name] = value.strip()
    return fields


def test_its_size_is_sealed(shared: SharedMemory) -> None:
    assert os.fstat(shared.fd).st_size == NBYTES
    for size in (NBYTES - 4096, NBYTES + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(shared.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(shared.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    shared.close()


def test_its_descriptor_is_not_inherited(shared: SharedMemory) -> None:
    assert not os.get_inheritable(shared.fd)
    shared.close()


def test_pages_come_by_populating_and_go_by_punching(shared: SharedMemory) -> None:
    assert _allocated(shared.fd) == 0
    shared.populate(0, MiB)
    assert _allocated(shared.fd) == MiB
    shared.populate(MiB, NBYTES - MiB)
    assert _allocated(shared.fd) == NBYTES
    other = Mapping(shared.fd, NBYTES)
    other.bytes[:] = 0x5A
    assert (shared.bytes == 0x5A).all()
    shared.punch()
    assert _allocated(shared.fd) == 0
    assert not other.bytes[:: mmap.PAGESIZE].any()
    other.close()
    shared.close()


def test_a_populated_mapping_is_resident(shared: SharedMemory) -> None:
    shared.populate(0, NBYTES)
    other = Mapping(shared.fd, NBYTES)
    address = other.bytes.ctypes.data
    assert _maps(address)["Rss"] == "0 kB"
    other.populate(0, NBYTES, write=True)
    assert _maps(address)["Rss"] == f"{NBYTES >> 10} kB"
    other.close()
    shared.close()


def test_populating_zeroes_nothing(shared: SharedMemory) -> None:
    shared.bytes[5] = 7
    shared.populate(0, NBYTES)
    other = Mapping(shared.fd, NBYTES)
    for write in (False, True):
        other.populate(0, NBYTES, write=write)
    assert shared.bytes[5] == other.bytes[5] == 7
    other.close()
    shared.close()


def test_what_cannot_be_populated_is_an_error(shared: SharedMemory) -> None:
    with pytest.raises(CapacityError) as caught:
        shared.mapping.populate(NBYTES, 1 << 46, write=True)
    assert caught.value.code == "SW-202"
    shared.close()


def test_not_in_forks_and_core_dumps(shared: SharedMemory) -> None:
    mapping = Mapping(shared.fd, NBYTES)
    for bytes_ in (shared.bytes, mapping.bytes):
        flags = _maps(bytes_.ctypes.data)["VmFlags"].split()
        assert "dc" in flags  # do not copy on fork
        assert "dd" in flags  # do not dump
    address = shared.bytes.ctypes.data
    child = os.fork()
    if child == 0:
        os._exit(1 if _maps(address) else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    mapping.close()
    shared.close()


def test_buffers_of_storage_are_not_in_forks_and_core_dumps() -> None:
    """Blocks lie in them that are opened, or not sealed yet."""
    buffer = staging.make(1)
    flags = _maps(buffer.ctypes.data)["VmFlags"].split()
    assert "dc" in flags and "dd" in flags


def test_closing_with_live_views(shared: SharedMemory) -> None:
    shared.bytes[:3] = (1, 2, 3)
    address = shared.bytes.ctypes.data
    view = shared.bytes[:3]
    shared.close()
    assert view.tolist() == [1, 2, 3]
    assert _maps(address)
    del view
    gc.collect()
    assert not _maps(address)


def test_closing_unmaps_and_is_idempotent(shared: SharedMemory) -> None:
    address, fd = shared.bytes.ctypes.data, shared.fd
    shared.close()
    assert not _maps(address)
    reused = os.open("/dev/null", os.O_RDONLY)
    assert reused == fd  # the number that a second close must not hit
    shared.close()
    os.fstat(reused)
    os.close(reused)


def test_what_nobody_has_any_more_is_given_back() -> None:
    shared = SystemMemory().make(NBYTES)
    name = os.fstat(shared.fd).st_ino
    assert name in _inodes()
    del shared
    gc.collect()
    assert name not in _inodes()


def _inodes() -> set[int]:
    """Of all that is open."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of this listing
            found.add(os.stat(f"/proc/self/fd/{fd}").st_ino)
    return found


def test_no_descriptor_left_is_an_error_of_ours() -> None:
    """Out of descriptors, a well refuses a slab; it does not fall over."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    gc.collect()  # what earlier tests left to be closed
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 16, hard))
    try:
        with pytest.raises(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(CapacityError):
            SharedMemory(NBYTES)  # no memfd
        os.close(taken.pop())
        with pytest.raises(CapacityError):
            SharedMemory(NBYTES)  # none for the descriptor that its mapping keeps
        os.close(taken.pop())
        SharedMemory(NBYTES).close()
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_slots_are_views_of_one_mapping(shared: SharedMemory) -> None:
    words = shared.bytes[:64].view(np.uint64)
    words[3] += np.uint64(9)
    assert shared.bytes[24] == 9
    del words
    shared.close()


@pytest.mark.parametrize("kind", ["slab", "buffer"])
@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_a_forked_child_keeps_what_it_has_at_its_parents_addresses(kind: str, how: str) -> None:
    """There is nothing of the parent's there: the next that is mapped may well lie there."""
    held: list[Any] = [SharedMemory(1 << 21) if kind == "slab" else staging.make(1 << 21)]
    address = (held[0].bytes if kind == "slab" else held[0]).ctypes.data
    child = os.fork()
    if child == 0:
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        fixed_noreplace, private_anonymous = 0x100000, 0x22
        mine = libc.mmap(address, 1 << 21, 3, fixed_noreplace | private_anonymous, -1, 0)
        if mine != address:
            os._exit(2)
        if how == "closed" and kind == "slab":
            held[0].close()
        held.clear()
        gc.collect()
        ctypes.memset(mine, 1, 1 << 21)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    if kind == "slab":
        held[0].close()
