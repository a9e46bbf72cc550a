"""What the doctor says of GPUs, asked of a driver that is compiled here and goes wrong as it is told to.

The driver is loaded and called as a real one is; what a GPU would do with the memory, nobody sees here.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from wells import eventually

from stepwell.ops.checks import gpu, memory
from stepwell.ops.checks.check import Check, guarded
from stepwell.ops.checks.driver import DriverFindings, Gpu, ask, how_it_ended, look
from stepwell.ops.checks.gpu import Software, Torch
from stepwell.ops.doctor import line

NOTHING = Software()
CUDA = Software("vllm 0.32.0", Torch("2.13.0", "12.4"))
NO_DRIVER = "libcuda-that-is-nowhere.so.1"

Doctor = Callable[..., dict[str, Check]]


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The library that is asked in place of libcuda."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here")
    made = tmp_path_factory.mktemp("driver") / "libfakecuda.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, Path(__file__).with_name("fake_cuda.c")], check=True)
    return str(made)


@pytest.fixture(scope="session")
def looked() -> dict[tuple[str, str], DriverFindings]:
    """What was seen of a library with a trouble: it is the same each time, and each time is a process."""
    return {}


@pytest.fixture
def doctor(driver: str, looked: dict[tuple[str, str], DriverFindings], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """What is found with a driver that has this trouble: checks by name."""

    def once(library: str) -> DriverFindings:
        key = library, os.environ["FAKE_CUDA"]
        if key not in looked:
            looked[key] = look(library)
        return looked[key]

    monkeypatch.setattr(gpu, "look", once)

    def found(trouble: str = "", has: Software = NOTHING, **env: str) -> dict[str, Check]:
        monkeypatch.setenv("FAKE_CUDA", trouble)
        checks = {check.name: check for check in guarded("gpu", lambda: gpu.all_of(env, has, driver))}
        for check in checks.values():
            assert (check.status == "ok") == (not check.fix) and "\n" not in line(check)
        return checks

    return found


def test_a_gpu_that_is_right(doctor: Doctor) -> None:
    checks = doctor("gpus=2", CUDA)
    assert list(checks) == ["gpu", "gpu-registration", "gpu-allocator", "gpu-copies"]
    assert {name: check.status for name, check in checks.items()} | {"gpu-copies": "ok"} == dict.fromkeys(checks, "ok")
    assert checks["gpu"].text.startswith("Fake 0 (80GiB), Fake 1 (80GiB); driver")
    facts = checks["gpu"].facts
    assert (facts["gpus"], facts["names"], facts["memory_bytes"]) == (2, "Fake 0, Fake 1", 160 << 30)
    assert facts["cuda"] == "12.4"
    assert float(checks["gpu-registration"].facts["register_seconds_per_gib"]) > 0


def test_the_version_of_the_driver(tmp_path: Path) -> None:
    seen = DriverFindings(step="done", cuda="12.4", gpus=(Gpu("Fake", 80 << 30, True),))
    assert "(80GiB); driver for CUDA up to 12.4" in gpu.visible(seen, NOTHING, tmp_path).text
    said = tmp_path / "sys/module/nvidia/version"
    said.parent.mkdir(parents=True)
    said.write_text("550.54.15\n")
    check = gpu.visible(seen, NOTHING, tmp_path)
    assert "driver 550.54.15 for CUDA" in check.text and check.facts["driver"] == "550.54.15"


def test_no_driver_is_worth_one_line() -> None:
    (check,) = gpu.all_of({}, NOTHING, NO_DRIVER)
    assert (check.name, check.status) == ("gpu", "ok")
    assert NO_DRIVER in check.text and check.text.endswith("engines run on CPU here")


@pytest.mark.parametrize(
    ("has", "named"),
    [
        (Software("vllm 0.32.0", None), "vllm 0.32.0"),
        (Software("", Torch("2.13.0", "12.4")), "torch 2.13.0"),
        (CUDA, "vllm 0.32.0 and torch 2.13.0"),
    ],
)
def test_no_driver_for_what_is_built_for_one(has: Software, named: str) -> None:
    check, allocator = gpu.all_of({}, has, NO_DRIVER)
    assert check.status == "warn" and f"but {named} here is built for one" in check.text and "--gpus" in check.fix
    assert (allocator.name, allocator.status) == ("gpu-allocator", "ok")
    (check,) = gpu.all_of({}, Software("", Torch("2.13.0+cpu", "")), NO_DRIVER)
    assert check.status == "ok"


@pytest.mark.parametrize("trouble", ["gpus=0", "cuInit=100", "cuInit=34"])
def test_a_driver_without_a_gpu(doctor: Doctor, trouble: str) -> None:
    (check,) = doctor(trouble).values()
    assert (check.name, check.status) == ("gpu", "ok") and check.text.startswith("the CUDA driver sees no GPU")
    assert doctor(trouble, CUDA)["gpu"].status == "warn"


@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        ("cuInit=803", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        ("cuInit=12345", "error 12345"),
        ("cuDeviceGetName=1", "CUDA_ERROR_INVALID_VALUE"),
        ("cuInit=die", "was ended by signal 6"),
    ],
)
def test_a_driver_that_does_not_work(doctor: Doctor, trouble: str, why: str) -> None:
    (check,) = doctor(trouble).values()
    assert check.status == "warn" and f"does not work: {why}" in check.text.replace("the process that asked ", "")
    checks = doctor(trouble, CUDA)
    assert checks["gpu"].status == "fail" and "gpu-registration" not in checks


def test_a_library_that_is_no_driver(tmp_path: Path, driver: str) -> None:
    empty = tmp_path / "empty.so"
    source = tmp_path / "empty.c"
    source.write_text("int nothing;")
    subprocess.run([shutil.which("cc") or "gcc", "-shared", "-fPIC", "-o", empty, source], check=True)
    seen = look(str(empty))
    assert (seen.step, seen.failure) == ("start", "refused") and "has no cuInit" in seen.error


def test_a_driver_that_hangs_is_not_waited_for(driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA", "cuInit=hang")
    seen = look(driver, patience=0.5)
    assert seen.failure == "lost" and seen.error == "it did not answer within 0.5 s"
    check = gpu.visible(seen, NOTHING)
    assert check.status == "warn" and "did not answer" in check.text, "a hang while loading is not 'no driver'"
    assert gpu.visible(DriverFindings(failure="lost", error="it did not answer within 0.5 s"), CUDA).status == "fail"


def test_a_process_that_does_not_answer_is_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    assert "did not answer" in how_it_ended(child, 0.01)
    assert child.poll() == -9


def test_who_asks_a_driver_ends_with_the_doctor(driver: str) -> None:
    code = f"from stepwell.ops.checks.driver import look; look({driver!r}, patience=600)"
    asking = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "FAKE_CUDA": "cuInit=hang"})
    children = Path(f"/proc/{asking.pid}/task/{asking.pid}/children")
    try:
        eventually(lambda: any(driver in maps(int(child)) for child in children.read_text().split()))
        (child,) = map(int, children.read_text().split())
    finally:
        asking.kill()
        asking.wait()
    eventually(lambda: driver not in maps(child))


def maps(pid: int) -> str:
    """What the process has mapped; nothing once it has ended."""
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def test_what_was_found_before_the_driver_died_is_told(doctor: Doctor) -> None:
    checks = doctor("cuMemHostRegister_v2=die")
    assert checks["gpu"].status == "ok" and "Fake 0" in checks["gpu"].text
    check = checks["gpu-registration"]
    assert check.status == "fail" and "(register): the process that asked was ended by signal 6" in check.text


def test_a_driver_that_refuses_to_register(doctor: Doctor) -> None:
    check = doctor("cuMemHostRegister_v2=2")["gpu-registration"]
    assert check.status == "fail" and "refused to register 67108864 bytes" in check.text
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    limited = "off" if limit == resource.RLIM_INFINITY else gpu.format_size(limit)
    assert f"CUDA_ERROR_OUT_OF_MEMORY; the limit on locked memory is {limited} [SW-208]" in check.text
    for part in ("LimitMEMLOCK=infinity", "--ulimit memlock=-1", "lower `host`"):
        assert part in check.fix


def test_a_gpu_without_unified_addressing(doctor: Doctor) -> None:
    checks = doctor("split")
    assert checks["gpu"].status == "ok"
    check = checks["gpu-registration"]
    assert check.status == "fail" and "Fake 0 has no unified addressing [SW-714]" in check.text


@pytest.mark.parametrize("code", [2, 46])
def test_a_gpu_that_an_engine_fills_is_not_tried(doctor: Doctor, code: int) -> None:
    check = doctor(f"cuDevicePrimaryCtxRetain={code}")["gpu-registration"]
    assert check.status == "warn" and "the GPU is in use" in check.text
    check = doctor("cuDevicePrimaryCtxRetain=1")["gpu-registration"]
    assert check.status == "fail" and "(context): CUDA_ERROR_INVALID_VALUE" in check.text


def test_a_slab_that_the_driver_does_not_give_back(doctor: Doctor) -> None:
    check = doctor("cuMemHostUnregister=1")["gpu-registration"]
    assert check.status == "fail" and "(unregister): CUDA_ERROR_INVALID_VALUE" in check.text


def test_no_memory_for_a_slab(driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA", "")
    monkeypatch.setattr(memory, "memory_allowed", lambda: memory.SLAB_BYTES)
    *_, seen = ask(driver)
    assert (seen.step, seen.failure) == ("slab", "refused")
    check = gpu.registration(seen)
    assert check.status == "fail" and "no memory left" in check.text


def test_a_torch_that_the_gpu_cannot_serve(doctor: Doctor) -> None:
    check = doctor("", Software("", Torch("2.13.0+cpu", "")))["gpu"]
    assert check.status == "warn" and "torch 2.13.0+cpu here is not built for CUDA" in check.text
    check = doctor("", Software("", Torch("2.13.0", "13.0")))["gpu"]
    assert check.status == "warn" and "built for CUDA 13.0" in check.text and "newer driver" in check.fix
    for cuda in ("12.8", "11.8", None):
        assert doctor("", Software("", Torch("2.13.0", cuda)))["gpu"].status == "ok"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("expandable_segments:True", True),
        ("max_split_size_mb:512, expandable_segments : True", True),
        ("expandable_segments:1", True),
        ("expandable_segments:False", False),
        ("max_split_size_mb:512", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_of_torch_that_is_mapped_piece_by_piece(name: str, value: str, told: bool) -> None:
    (check,) = gpu.allocator({name: value}, expected=True)
    assert check.status == ("warn" if told else "ok")
    assert not told or (check.text.startswith(f"{name} has") and "inert" in check.text and "remove it" in check.fix)
    assert len(list(gpu.allocator({name: value}, expected=False))) == told


def test_copies_are_unverified_until_a_gpu_is_named() -> None:
    check = gpu.copies("")
    assert check.status == "warn" and check.text == "copies on CUDA are unverified on GPU"
    assert gpu.copies("Fake 0").status == "ok"


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("from typing import Optional\n__version__ = '9.9'\ncuda: Optional[str] = '12.8'\nhip: str = None\n", "12.8"),
        ("cuda: Optional[str] = None\n", ""),
        ("cuda = '11.8'\n", "11.8"),
        ("__version__ = '9.9'\n", None),
        ("cuda = (\n", None),
        (None, None),
    ],
)
def test_torch_is_read_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, cuda: str | None
) -> None:
    (tmp_path / "torch-9.9.dist-info").mkdir()
    (tmp_path / "torch-9.9.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise SystemExit('torch was imported')")
    if text is not None:
        (tmp_path / "torch/version.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    has = gpu.software()
    assert has.torch == Torch("9.9", cuda)
    assert ("torch 9.9" in has.for_gpu) == bool(cuda)


def test_the_doctor_loads_no_torch() -> None:
    code = (
        "import sys; from stepwell.ops.checks import gpu; list(gpu.all_of({}, gpu.software()))\n"
        "import stepwell.engines.paged.gpu.cuda; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ), timeout=60).returncode == 0


def test_each_check_has_its_row_in_the_page(doctor: Doctor) -> None:
    page = (Path(__file__).parents[2] / "docs/doctor.md").read_text()
    rows = set(re.findall(r"`([a-z-]+)`", " ".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE))))
    assert set(doctor("", CUDA)) <= rows
