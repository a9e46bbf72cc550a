"""What the engine driver does around vLLM, with real processes: whom it finds and kills, and what it leaves alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell.demo.engine import EngineConfig, end_session, log_tail, session_members

# A parent with a child, and a grandchild that left the session as a detached well does. Prints the latter's pid.
TREE = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
out = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(out.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def tree() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    parent = subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, start_new_session=True)
    assert parent.stdout is not None
    detached = int(parent.stdout.readline())
    yield parent, detached
    end_session(parent.pid, lambda pid: True, 10)
    os.kill(detached, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()


def test_all_of_a_session_is_killed_and_what_left_it_lives(tree: tuple[subprocess.Popen[bytes], int]) -> None:
    parent, detached = tree
    assert len(session_members(parent.pid)) == 2
    end_session(parent.pid, lambda pid: True, 10)
    assert session_members(parent.pid) == []
    assert parent.wait() == -signal.SIGKILL
    assert session_members(detached) == [detached]


def test_spared_members_are_waited_for_and_not_killed(tree: tuple[subprocess.Popen[bytes], int]) -> None:
    parent, _ = tree
    end_session(parent.pid, lambda pid: pid == parent.pid, 0.2)
    left = session_members(parent.pid)
    assert len(left) == 1
    assert parent.pid not in left


def test_an_orphan_is_still_found_by_its_session(tree: tuple[subprocess.Popen[bytes], int]) -> None:
    parent, _ = tree
    parent.kill()
    parent.wait()
    assert len(session_members(parent.pid)) == 1


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {number} {'x' * 100}\n" for number in range(1000)))
    assert [line.split()[1] for line in log_tail(log, 3).splitlines()] == ["997", "998", "999"]


def test_the_pool_has_the_pages_asked_for_beside_vllms_null_block(tmp_path: Path) -> None:
    arguments = EngineConfig(tmp_path, page=128, pool_pages=39, max_model_len=2944).arguments()
    assert arguments["num_gpu_blocks_override"] == 40
    assert arguments["kv_transfer_config"] is None


def test_extra_arguments_win(tmp_path: Path) -> None:
    config = EngineConfig(tmp_path, 32, 9, 64, connector={"kv_connector": "X"}, extra={"block_size": 64, "seed": 3})
    assert (config.arguments()["block_size"], config.arguments()["seed"]) == (64, 3)
    assert config.arguments()["kv_transfer_config"] == {"kv_connector": "X"}
