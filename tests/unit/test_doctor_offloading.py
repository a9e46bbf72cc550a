"""`stepwell doctor` on vLLM's own offloading, for a well below it."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner
from wells import InThread, Raw, eventually, home_apart, scheduler
from wells import well as well

from stepwell.cli.commands import app
from stepwell.config import Settings
from stepwell.engines.vllm.settings import MIN_WINDOW
from stepwell.ops.checks import offloading, places
from stepwell.protocol.messages import Report

MIB = 1 << 20


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in shared memory."""
    with tempfile.TemporaryDirectory(dir=offloading.SHARED) as folder:
        yield Path(folder)


@pytest.mark.parametrize(("files", "status"), [(("v1/kv_offload/tiering/factory.py",), ["ok"]), ((), ["warn"])])
def test_a_vllm_whose_offloading_takes_tiers(tmp_path: Path, files: tuple[str, ...], status: list[str]) -> None:
    for name in ("__init__.py", *files):
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise AssertionError('it is not imported')")
    code = "from stepwell.ops.checks import offloading; print([c.status for c in offloading.interface()])"
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
    assert done.stdout == f"{status}\n"


def test_no_vllm_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading.util, "find_spec", lambda name: None)
    assert list(offloading.interface()) == []


def test_vllms_host_memory_beside_the_arena(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(offloading, "memory_allowed", lambda system: 512 * MIB)

    def found(cpu_bytes: int, held: int = 0, **settings: str) -> tuple[str, str]:
        (check,) = offloading.memory(Settings.model_validate(settings), cpu_bytes, held, shared=tmp_path)
        return check.status, f"{check.text}; {check.fix}"

    assert found(512 * MIB - MIN_WINDOW)[0] == "ok", "a well that the tier starts has a window"
    assert found(512 * MIB - MIN_WINDOW + 1)[0] == "fail"
    assert found(512 * MIB - MIN_WINDOW + 1, held=1)[0] == "ok", "what the well has taken is its own"
    status, text = found(300 * MIB, host="300MiB")
    assert status == "fail" and "and host 300MiB of 512MiB" in text
    status, text = found(1 << 60)
    assert status == "fail" and "--shm-size" in text and str(tmp_path) in text


def test_a_file_that_somebody_has_is_no_leftover(shared: Path) -> None:
    path = shared / "vllm_offload_an-engine.mmap"
    with path.open("w+b") as file:
        file.truncate(MIB)
        region = mmap.mmap(file.fileno(), MIB)
        region[:] = b"x" * MIB
        assert [check.status for check in offloading.leftovers(shared)] == ["ok"]
    assert [check.status for check in offloading.leftovers(shared)] == ["ok"], "it is mapped"
    region.close()
    (check,) = offloading.leftovers(shared)
    assert check.status == "warn" and "1 file(s)" in check.text and "1MiB" in check.text
    assert check.fix == f"rm {path}" and check.facts == {"files": 1, "bytes": MIB}
    assert path.exists(), "a person deletes it"


def test_what_is_not_vllms_is_left_alone(shared: Path) -> None:
    (shared / "vllm_offload_link.mmap").symlink_to("/etc/hostname")
    os.mkfifo(shared / "vllm_offload_pipe.mmap")
    (shared / "another.mmap").write_bytes(b"x")
    assert [check.status for check in offloading.leftovers(shared)] == ["ok"]


def test_many_leftovers_are_named_in_part(shared: Path) -> None:
    for number in range(9):
        (shared / f"vllm_offload_{number}.mmap").write_bytes(b"x")
    (check,) = offloading.leftovers(shared)
    assert check.facts["files"] == 9 and check.fix.count(str(shared)) == 8 and check.fix.endswith(", and ask again")


def test_the_size_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    with home_apart(monkeypatch) as home:
        told = CliRunner().invoke(app, ["doctor", "--home", str(home), "--cpu", "900TiB", "--json"])
        assert told.exit_code == 1
        checks = {check["check"]: check for check in json.loads(told.output)["checks"]}
        check = checks["engine-memory"]
        assert check["status"] == "fail" and check["facts"]["cpu_bytes"] == 900 << 40


def test_engines_whose_block_hashes_no_later_start_has(well: InThread, tmp_path: Path) -> None:
    (check,), _ = places.well(tmp_path, well.path)
    assert "SW-408" not in check.text
    engine = Raw(well.path)
    engine.send(scheduler(), Report({"cold_restarts": 2}))
    eventually(lambda: well.hierarchy.stats().get("engine_cold_restarts") == 2)
    (check,), _ = places.well(tmp_path, well.path)
    engine.close()
    assert check.status == "warn" and "2 engine(s)" in check.text and "SW-408" in check.text
    assert "sha256" in check.fix and "PYTHONHASHSEED" in check.fix
