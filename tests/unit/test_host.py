"""The memory a process may use: the tightest control group above it, of either version, and the machine itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepwell.errors import Unsupported
from stepwell.io.host import default_host_bytes, memory_allowed

MIB = 1 << 20
V2 = "30 1 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = """\
30 1 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu
31 1 0:31 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
"""


def machine(system: Path, available: int, *, mounts: str = "", cgroup: str = "") -> Path:
    self = system / "proc/self"
    self.mkdir(parents=True)
    (system / "proc/meminfo").write_text(f"MemTotal: 999999999 kB\nMemAvailable:   {available // 1024} kB\n")
    (self / "mountinfo").write_text(mounts)
    (self / "cgroup").write_text(cgroup)
    return system


def group(system: Path, path: str, **files: object) -> None:
    directory = system / "sys/fs/cgroup" / path
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (directory / name.replace("__", ".")).write_text(f"{value}\n")


def test_without_groups_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert memory_allowed(machine(tmp_path, 5 * MIB)) == 5 * MIB


def test_version_2_the_tightest_group_up_to_the_top_counts(tmp_path: Path) -> None:
    system = machine(tmp_path, 900 * MIB, mounts=V2, cgroup="0::/a/b\n")
    group(system, "", memory__stat="inactive_file 1")  # the top has no limit file
    group(system, "a", memory__max=500 * MIB, memory__current=100 * MIB, memory__stat="anon 1\ninactive_file 0")
    group(system, "a/b", memory__max="max", memory__current=50 * MIB, memory__stat="")
    assert memory_allowed(system) == 400 * MIB
    group(system, "a/b", memory__max=300 * MIB)
    assert memory_allowed(system) == 250 * MIB
    group(system, "a/b", memory__high=200 * MIB)
    assert memory_allowed(system) == 150 * MIB
    group(system, "", memory__max=10 * MIB, memory__current=0)
    assert memory_allowed(system) == 10 * MIB


def test_file_cache_that_can_be_given_back_is_no_usage(tmp_path: Path) -> None:
    system = machine(tmp_path, 900 * MIB, mounts=V2, cgroup="0::/a\n")
    stat = f"anon 7\ninactive_file {60 * MIB}\nactive_file {20 * MIB}\n"
    group(system, "a", memory__max=100 * MIB, memory__current=90 * MIB, memory__stat=stat)
    assert memory_allowed(system) == 70 * MIB
    group(system, "a", memory__current=10 * MIB)
    assert memory_allowed(system) == 100 * MIB


def test_the_machine_counts_where_it_has_less_than_the_group(tmp_path: Path) -> None:
    system = machine(tmp_path, 30 * MIB, mounts=V2, cgroup="0::/\n")
    group(system, "", memory__max=100 * MIB, memory__current=0)
    assert memory_allowed(system) == 30 * MIB


def test_a_group_over_its_limit_allows_nothing(tmp_path: Path) -> None:
    system = machine(tmp_path, 30 * MIB, mounts=V2, cgroup="0::/\n")
    group(system, "", memory__max=10 * MIB, memory__current=20 * MIB)
    assert memory_allowed(system) == 0
    assert default_host_bytes(system) == 0


@pytest.mark.parametrize(
    ("root", "cgroup", "place"),
    [
        ("/", "5:cpu:/wrong\n4:memory:/job/7\n0::/\n", "memory/job/7"),
        ("/docker/abc", "4:memory:/docker/abc\n", "memory"),
        ("/docker/abc", "4:hugetlb,memory:/docker/abc/inner\n", "memory/inner"),
        ("/docker/abc", "4:memory:/../other\n", "memory"),
        ("/", "4:memory:/../other\n", "memory"),
    ],
)
def test_version_1_also_where_a_container_sees_only_its_part(
    tmp_path: Path, root: str, cgroup: str, place: str
) -> None:
    system = machine(tmp_path, 900 * MIB, mounts=V1.format(root=root), cgroup=cgroup)
    unlimited = 0x7FFFFFFFFFFFF000
    group(system, "memory", memory__limit_in_bytes=unlimited, memory__usage_in_bytes=0)
    group(system, "memory/wrong", memory__limit_in_bytes=1, memory__usage_in_bytes=0)
    stat = f"inactive_file 1\ntotal_inactive_file {20 * MIB}"
    group(system, place, memory__limit_in_bytes=200 * MIB, memory__usage_in_bytes=120 * MIB, memory__stat=stat)
    assert memory_allowed(system) == 100 * MIB


@pytest.mark.parametrize(
    ("allowed", "host"),
    [(0, 0), (63, 0), (64, 16), (127, 16), (1024, 256), (64 << 10, 16 << 10), (1 << 20, 16 << 10)],
)
def test_the_default_is_a_bounded_quarter_in_steps(tmp_path: Path, allowed: int, host: int) -> None:
    assert default_host_bytes(machine(tmp_path, allowed * MIB)) == host * MIB


@pytest.mark.parametrize("text", [None, "MemTotal: 5 kB\n", "MemAvailable: much\n", "MemAvailable:\n"])
def test_a_machine_that_does_not_say_is_refused(tmp_path: Path, text: str | None) -> None:
    system = machine(tmp_path, MIB)
    (system / "proc/meminfo").unlink()
    if text is not None:
        (system / "proc/meminfo").write_text(text)
    with pytest.raises(Unsupported) as caught:
        memory_allowed(system)
    assert caught.value.code == "SW-701"


def test_this_machine_has_memory_for_these_tests() -> None:
    assert 0 < default_host_bytes() < memory_allowed()
