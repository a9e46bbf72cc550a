"""Processes of a sweep end with whoever began them, however that ends, and what kills one is told."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

# Each in a process of its own, which may have no others and no threads.
BEGIN = """
import multiprocessing, os, signal, sys, threading, time
from stepwell.errors import StepwellError
from stepwell.simulate.processes import each

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs tests in the background has it ignored

names = []

def work(index):
    task = names[index]
    if task == "wait":
        time.sleep(600)
    if task == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "fail":
        raise StepwellError.__subclasses__()[0]("SW-122", what="a", why="b", fix="c")
    if task == "tell":
        os.write(1, b"%d\\n" % os.getpid())  # at once: print writes the line and its end
        time.sleep(600)
    return b"of %d" % task

def run(processes, tasks):
    names[:] = tasks
    return each(processes, work, len(names))
"""


def begun(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BEGIN + script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def said(script: str) -> str:
    process = begun(script)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    return out


@pytest.fixture
def telling() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Two that would work for long, and their parent; pidfds, because numbers of processes are used again."""
    parent = begun('list(run(2, ["tell"] * 3))')
    assert parent.stdout is not None
    pidfds = [os.pidfd_open(int(parent.stdout.readline())) for _ in range(2)]
    yield parent, pidfds
    parent.kill()
    for pidfd in pidfds:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
    parent.communicate()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_none_outlives_its_parent(telling: tuple[subprocess.Popen[str], list[int]], how: signal.Signals) -> None:
    parent, pidfds = telling
    parent.send_signal(how)
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], 60)[0], "it works on for nobody"
    assert parent.wait(60) == -how


def test_ctrl_c_is_told_once(telling: tuple[subprocess.Popen[str], list[int]]) -> None:
    """A terminal sends it to all of them."""
    parent, pidfds = telling
    for pidfd in pidfds:
        signal.pidfd_send_signal(pidfd, signal.SIGINT)
    assert not select.select(pidfds, [], [], 0.5)[0], "that is for the parent to see to"
    parent.send_signal(signal.SIGINT)
    _, err = parent.communicate(timeout=60)
    assert err.count("KeyboardInterrupt") == 1


def test_every_task_is_answered_once_and_nothing_is_left() -> None:
    out = said("""
for n in range(10):
    found = list(run(3, range(n)))
    assert sorted(found) == [(i, b"of %d" % i) for i in range(n)], found
    assert not multiprocessing.active_children() and threading.active_count() == 1
print("all")
""")
    assert out == "all\n"


def test_nothing_is_left_when_it_is_closed_in_the_middle() -> None:
    """The other one would work for long."""
    out = said("""
running = run(2, ["wait", 1, "wait"])
print(next(running))
running.close()
print(multiprocessing.active_children())
""")
    assert out == "(1, b'of 1')\n[]\n"


FEW_FILES = "resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))"


@pytest.mark.parametrize(("first", "count", "tasks", "shown"), [
    ("", 2, ["wait", "fail", 1], ["what: a why: b fix: c [SW-122]"]),
    ("", 2, ["wait", "die", 1], ["SIGKILL (9)", "fewer --processes", "--keep", "[SW-205]"]),
    (FEW_FILES, 20, ["wait"] * 20, ["Too many open files", "[SW-205]"]),
], ids=["its task fails", "it is killed", "it cannot be started"])  # fmt: skip
def test_what_becomes_of_one_is_the_callers_error_and_ends_the_others(
    first: str, count: int, tasks: list[object], shown: list[str]
) -> None:
    out = said(f"""
import resource
{first}
try:
    list(run({count}, {tasks}))
except Exception as error:
    print(error, multiprocessing.active_children())
""")
    assert all(words in out for words in shown) and out.endswith(" []\n")


def test_a_sweep_that_is_killed_leaves_nobody_and_a_file_to_go_on_from(tmp_path: Path) -> None:
    keep = tmp_path / "rows"
    command = [sys.executable, "-m", "stepwell", "simulate", "agentic:conversations=40", "--processes", "2", "--json"]
    arguments = ["--policy", "lru,auto", "--capacity-tokens", "1%,50%", "--keep", str(keep)]
    # What it leaves would hold its ends of these pipes.
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while process.poll() is None and not (keep.exists() and keep.stat().st_size):
        select.select([], [], [], 0.01)
    process.kill()
    process.communicate(timeout=60)
    done = subprocess.run([*command, *arguments], capture_output=True, check=True, timeout=120)
    assert len(keep.read_bytes().splitlines()) == 4
    assert done.stderr == b""
