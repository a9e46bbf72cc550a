"""Tests that are shared by forks: each runs once, and whatever becomes of one of them is said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lab import FOLDER

SHARED = """
import os, pytest, time

@pytest.fixture(scope="module")
def shared():
    yield
    print("taken down", file=open("ended", "a"))
"""

FIRST = f"""{SHARED}
@pytest.mark.parametrize("n", range(40))
def test_many(shared, n, tmp_path_factory):
    open("begun", "w").close()
    print(n, os.getpid(), tmp_path_factory.mktemp("t"), file=open("ran", "a"))
    time.sleep(0.01)
"""

SECOND = """
import os, pytest, time

def test_that_ends_its_process():
    while not os.path.exists("begun"):
        time.sleep(0.01)
    os._exit(3)

def test_that_fails():
    os.system("echo said by a child")
    assert not os.environ

def test_that_is_skipped():
    pytest.skip("because")

@pytest.mark.xfail
def test_that_is_expected_to_fail():
    assert False

def test_after_all_of_them():
    pass
"""


LONG = """
def test_that_takes_long(shared):
    open("begun", "w").close()
    time.sleep(60)
"""


def run(folder: Path, *options: str) -> str:
    (folder / "test_1.py").write_text(FIRST)
    (folder / "test_2.py").write_text(SECOND)
    command = [sys.executable, "-m", "pytest", "-p", "lab.rig.suite.forks", "-p", "no:cacheprovider", "-rs", *options]
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_each_runs_once_and_a_fork_that_dies_fails_the_test_that_it_ran(tmp_path: Path) -> None:
    said = run(tmp_path, "--forks", "3")
    assert "2 failed, 41 passed, 1 skipped, 1 xfailed" in said
    assert "the process that ran it has ended: 3" in said and "said by a child" in said and "because" in said
    ran = [line.split() for line in (tmp_path / "ran").read_text().splitlines()]
    assert sorted(int(n) for n, _, _ in ran) == list(range(40))
    forks, folders = {pid for _, pid, _ in ran}, {folder for _, _, folder in ran}
    assert len(forks) == 3 and len(folders) == 40


def test_tests_that_go_on_where_the_one_before_ended_stay_together(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    kernel: as in the real one\n")
    (tmp_path / "test_0.py").write_text(f"import pytest\npytestmark = pytest.mark.kernel\n{FIRST}")
    run(tmp_path, "--forks", "3", "test_0.py", "test_2.py")
    assert len({line.split()[1] for line in (tmp_path / "ran").read_text().splitlines()}) == 1
    assert (tmp_path / "ended").read_text() == "taken down\n"


def test_a_run_that_stops_takes_down_what_its_forks_have_set_up(tmp_path: Path) -> None:
    (tmp_path / "test_0.py").write_text(SHARED + LONG)
    said = run(tmp_path, "--forks", "2", "-x", "test_0.py", "test_2.py")
    assert "stopping after 1 failures" in said
    assert (tmp_path / "ended").read_text() == "taken down\n"
