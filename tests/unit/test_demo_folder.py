"""The demo's own folder: fresh, locked while the demo lives, gone after it, and the mess of a killed one cleared."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stepwell.cli.commands import app
from stepwell.demo import run
from stepwell.demo.engine import EngineFailed
from stepwell.demo.folder import demo_folder
from stepwell.demo.well import DemoWell
from stepwell.errors import StepwellError

OTHER_DEMO = """
import sys, time
from pathlib import Path
from stepwell.demo.folder import demo_folder
with demo_folder(Path(sys.argv[1])) as folder:
    (folder / "engine.log").write_text("working")
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _own_runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))


def test_it_is_gone_afterwards(tmp_path: Path) -> None:
    base = tmp_path / "cache"
    with demo_folder(base) as folder:
        (folder / "home").mkdir()
        assert folder.parent == base
    assert list(base.iterdir()) == []


def test_it_is_gone_after_ctrl_c(tmp_path: Path) -> None:
    base = tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt), demo_folder(base):
        raise KeyboardInterrupt
    assert list(base.iterdir()) == []


def test_a_failed_engines_log_stays_until_the_next_demo(tmp_path: Path) -> None:
    base = tmp_path / "cache"
    with pytest.raises(EngineFailed), demo_folder(base) as folder:
        log = folder / "engine.log"
        log.write_text("why")
        raise EngineFailed("it ended", log)
    assert log.read_text() == "why"
    with demo_folder(base) as second:
        assert list(base.iterdir()) == [second]


def test_a_living_demo_is_left_alone_and_a_killed_one_cleared(tmp_path: Path) -> None:
    base = tmp_path / "cache"
    command = [sys.executable, "-c", OTHER_DEMO, str(base)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        with demo_folder(base) as ours:
            assert set(base.iterdir()) == {ours, theirs}
            assert (theirs / "engine.log").read_text() == "working"
        other.send_signal(signal.SIGKILL)
    assert theirs.is_dir()
    with demo_folder(base) as ours:
        assert list(base.iterdir()) == [ours]


def test_other_things_in_the_cache_are_not_touched(tmp_path: Path) -> None:
    base = tmp_path / "cache"
    for name in ("models", "demo-notes"):
        (base / name).mkdir(parents=True)
    with demo_folder(base):
        pass
    assert {path.name for path in base.iterdir()} == {"models", "demo-notes"}


def test_a_disk_tier_that_cannot_be_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    folder.mkdir()
    for nbytes in (1 << 20, 1 << 60):
        with pytest.raises(StepwellError):
            DemoWell(folder / "home", 0, nbytes).check()
        assert not list(folder.iterdir())


def test_sigterm_ends_the_demo_as_ctrl_c_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(options: run.DemoOptions) -> None:
        with demo_folder(tmp_path / "demos"):
            assert list((tmp_path / "demos").iterdir())
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(run, "run", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    try:
        ended = CliRunner().invoke(app, ["demo"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.exit_code == 128 + signal.SIGTERM
    assert not list((tmp_path / "demos").iterdir())
