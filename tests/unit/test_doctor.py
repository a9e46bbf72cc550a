"""`stepwell doctor`: each thing that can be wrong with a machine is made wrong, as really as a test can, and found."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner
from wells import eventually, home_apart

from stepwell.cli.commands import app
from stepwell.client import control, start
from stepwell.config import DiskPlace, Settings
from stepwell.engines.vllm.versions import is_tested
from stepwell.io import staging
from stepwell.io.host import memory_allowed
from stepwell.ops.checks import disk, memory, places, speed
from stepwell.ops.checks.check import Check, guarded
from stepwell.ops.doctor import examine, line
from stepwell.units import parse_amount
from stepwell.vault.keyring import Keyring

ROOT = os.geteuid() == 0


def one(checks: Iterable[Check], name: str) -> Check:
    (found,) = [check for check in checks if check.name == name]
    return found


def found(name: str, checks: Callable[[], Iterable[Check]]) -> tuple[str, str]:
    """Status and line of the check `name`, as the doctor would see it."""
    check = one(guarded(name, checks), name)
    assert (check.status == "ok") == (not check.fix)
    return check.status, line(check)


def place(path: Path, size: str = "1GiB") -> DiskPlace:
    return DiskPlace(path, parse_amount(size))


def settings(*disks: DiskPlace, **others: object) -> Settings:
    return Settings.model_validate({"disk": list(disks), "disk_reserve": "1MiB", **others})


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "disk"
    made.mkdir(0o700)
    return made


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home and a runtime directory of their own; whatever well is left there is ended."""
    with home_apart(monkeypatch) as home:
        yield home
        if pid := control.pid(home):
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: control.pid(home) is None)


def test_a_machine_that_is_right(home: Path, directory: Path) -> None:
    home.mkdir(0o700)
    Keyring.open(home / "keyring")
    (home / "stepwell.yaml").write_text(f"host: 64MiB\ndisk: {directory}:128MiB\ndisk_reserve: 1MiB\n")
    before = sorted(home.iterdir())
    checks = list(examine(home, {}))
    assert [check.name for check in checks if not check.name.startswith(("gpu-", "engine-tiers"))] == [
        "settings",
        "home",
        "keyring",
        "runtime-directory",
        "well",
        "paused",
        "engine",
        "engine-leftovers",
        "memory",
        "shared-memory",
        "huge-pages",
        "open-files",
        "locked-memory",
        "locked-keys",
        "gpu",
        "disk-directory",
        "disk-filesystem",
        "disk-space",
        "disk-speed",
        "disk-key",
    ]
    assert [line(check) for check in checks if check.status == "fail"] == []
    assert all("\n" not in line(check) for check in checks)
    assert sorted(home.iterdir()) == before, "no README, no log"
    assert list(directory.iterdir()) == []
    assert list(Path(os.environ["TMPDIR"], f"stepwell-{os.geteuid()}").iterdir()) == []


def test_settings_that_cannot_be_used_do_not_end_the_doctor(home: Path) -> None:
    checks = list(examine(home, {"STEPWELL_HOTS": "1"}))
    assert one(checks, "settings").status == "fail"
    assert "SW-104" in one(checks, "settings").text and "STEPWELL_HOST" in one(checks, "settings").fix
    assert one(checks, "memory").facts["host_bytes"]


def test_settings_that_contradict_each_other_are_one_failed_check(home: Path) -> None:
    checks = list(examine(home, {"STEPWELL_ALLOW_UIDS": "7", "STEPWELL_METRICS": str(home.parent / "m.sock")}))
    check = one(checks, "settings")
    assert check.status == "fail" and "SW-102" in check.text and "set socket too" in check.fix
    assert one(checks, "metrics").status == "ok", "the rest is examined as it is set"


def test_options_count_as_they_do_for_the_well(home: Path, directory: Path) -> None:
    options = ["--host", "900TiB", "--disk", f"{directory}:128MiB", "--disk", "/proc/new:1GiB"]
    done = CliRunner().invoke(app, ["doctor", "--home", str(home), "--json", *options])
    checks = json.loads(done.output)["checks"]
    assert done.exit_code == 1
    assert [check["status"] for check in checks if check["check"] == "memory"] == ["fail"]
    assert {check["of"] for check in checks} == {"", str(directory), "/proc/new"}
    assert not any((home / name).exists() for name in ("keyring", "disks.json")), "nothing is made"


def test_the_arena_against_the_memory_that_is_allowed() -> None:
    status, text = found("memory", lambda: memory.host(Settings.model_validate({"host": "900TiB"})))
    assert status == "fail" and "SW-106" in text
    status, text = found("memory", lambda: memory.host(Settings.model_validate({"host": "1MiB"})))
    assert status == "fail" and "SW-107" in text
    more = memory_allowed() + (8 << 30)
    wanted = Settings.model_validate({"host": more})
    assert found("memory", lambda: memory.host(wanted))[0] == "fail"
    assert found("memory", lambda: memory.host(wanted, held=16 << 30))[0] == "ok", "what the well holds is its own"
    half = one(memory.host(Settings.model_validate({"host": "50%"})), "memory").facts
    assert half["host_bytes"] == int(half["allowed_bytes"]) // 2


def test_shared_memory_is_tried_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    check = one(memory.shared(), "shared-memory")
    assert float(check.facts["populate_seconds_per_gib"]) > 0
    monkeypatch.setattr(memory, "_SLOW_SECONDS_PER_GIB", 0.0)
    assert found("shared-memory", memory.shared)[0] == "warn"
    monkeypatch.setattr(memory, "memory_allowed", lambda: memory.SLAB_BYTES)
    assert found("shared-memory", memory.shared)[0] == "fail"


IN_A_PROCESS = """
import ctypes, json, resource, sys
from pathlib import Path
from stepwell.config import DiskPlace, Settings
from stepwell.ops.checks import disk, memory, places
from stepwell.ops.doctor import line
def tell(checks):
    print(json.dumps([[c.name, c.status, line(c)] for c in checks]))
"""


def told(code: str, *wrap: str) -> list[dict[str, tuple[str, str]]]:
    """What a process of its own finds: for each `tell` of `code`, status and line by name."""
    run = [*wrap, sys.executable, "-c", IN_A_PROCESS + code]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [{name: (status, text) for name, status, text in json.loads(each)} for each in done.stdout.splitlines()]


def test_huge_pages_that_a_mapping_does_not_get() -> None:
    code = (
        "assert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0\n"  # PR_SET_THP_DISABLE
        "tell(memory.huge_pages(Settings()))\n"
        "tell(memory.huge_pages(Settings(disk='/a')))\n"
    )
    without, with_disk = told(code)
    assert without["huge-pages"][0] == "ok" and "needed only by a disk tier" in without["huge-pages"][1]
    status, text = with_disk["huge-pages"]
    assert status == "warn" and "0B of 8MiB" in text and "echo madvise" in text


def test_huge_pages_as_this_system_gives_them() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    check = one(memory.huge_pages(settings(place(Path("/a")))), "huge-pages")
    if not enabled.exists() or "[never]" in enabled.read_text():
        assert check.status == "warn"
    else:
        assert int(check.facts["huge_bytes"]) > 0, line(check)
    assert staging.make(4 << 20).ctypes.data % staging.HUGE == 0


@pytest.mark.parametrize(("files", "status"), [(4096, "ok"), (1024, "warn"), (255, "fail")])
def test_few_descriptors(files: int, status: str) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < files:
        pytest.skip("this process may open fewer")
    code = f"resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}))\n"
    (checks,) = told(code + "tell(memory.limits(Settings(), gpu_engine=False))\n")
    assert checks["open-files"][0] == status and str(files) in checks["open-files"][1]


def test_little_locked_memory_matters_to_engines_on_gpus() -> None:
    code = "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
    limits = "tell(memory.limits(Settings(), gpu_engine={}))\n"
    without, with_gpu = told(code + limits.format(False) + limits.format(True))
    assert without["locked-memory"][0] == "ok"
    status, text = with_gpu["locked-memory"]
    assert status == "warn" and "64KiB" in text and "LimitMEMLOCK" in text


def test_a_home_that_is_not_safe_is_left_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    status, text = found("home", lambda: places.home(tmp_path))
    assert status == "fail" and "SW-602" in text
    assert list(tmp_path.iterdir()) == []
    status, text = found("home", lambda: places.home(tmp_path / "a" / "b"))
    assert status == "ok" and "not there yet" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("damage", "code"), [("flip", "SW-303"), ("mode", "SW-605"), ("link", "SW-605")])
def test_a_keyring_that_cannot_be_used_is_left_as_it_is(tmp_path: Path, damage: str, code: str) -> None:
    path = tmp_path / "keyring"
    assert found("keyring", lambda: places.keyring(tmp_path))[0] == "ok"
    assert not path.exists()
    Keyring.open(path)
    assert "1 tenant(s), 1 key(s)" in found("keyring", lambda: places.keyring(tmp_path))[1]
    if damage == "flip":
        path.write_bytes(path.read_bytes().replace(b"default", b"defaulT"))
    elif damage == "mode":
        path.chmod(0o640)
    else:
        path.symlink_to(path.rename(tmp_path / "elsewhere"))

    def state() -> object:
        return path.lstat().st_mode, path.lstat().st_mtime_ns, path.read_bytes(), sorted(tmp_path.iterdir())

    before = state()
    status, text = found("keyring", lambda: places.keyring(tmp_path))
    assert status == "fail" and code in text
    assert state() == before


def test_a_runtime_directory_that_cannot_be_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found("runtime-directory", places.runtime)[0] == "ok"
    Path(os.environ["TMPDIR"], f"stepwell-{os.geteuid()}").chmod(0o755)
    status, text = found("runtime-directory", places.runtime)
    assert status == "fail" and "SW-604" in text
    long = home.parent / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    status, text = found("runtime-directory", places.runtime)
    assert status == "fail" and "SW-109" in text
    monkeypatch.setenv("TMPDIR", str(home.parent))
    Path(os.environ["TMPDIR"], f"stepwell-{os.geteuid()}").chmod(0o700)


def test_a_well_that_runs_and_one_that_is_stopped(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks, held = places.well(home)
    assert checks[0].status == "ok" and "none runs" in checks[0].text and held == 0
    start.find_or_start(home, {"host": "64MiB"})
    checks, held = places.well(home)
    pid = control.pid(home)
    assert pid and checks[0].status == "ok" and f"process {pid}" in checks[0].text
    with monkeypatch.context() as patch:
        patch.setattr(places, "__version__", "9.9")
        (check,), _ = places.well(home)
        assert check.status == "warn" and "9.9" in check.fix
    os.kill(pid, signal.SIGSTOP)
    try:
        check = one(examine(home, {}), "well")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert check.status == "fail" and "SW-503" in check.text


def test_the_engine_beside_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "vllm-9.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.9\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert places.installed()["vllm"] == "9.9.9"
    check = next(iter(places.engine()))
    assert check.status == "warn" and "9.9.9 is not tested" in check.text and "0.32" in check.fix
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.2+cu128\n")
    assert next(iter(places.engine())).status == "ok"
    monkeypatch.setattr(places, "installed", dict)
    assert found("engine", places.engine) == ("ok", "ok    engine: no vLLM in this environment; a well needs none")


@pytest.mark.parametrize(
    ("version", "tested"),
    [("0.32.0", True), ("0.31.1rc2", True), ("0.32", True), ("0.33.0", False), ("0.3.1", False), ("1.32.0", False)],
)
def test_tested_versions(version: str, tested: bool) -> None:
    assert is_tested(version) is tested


def test_whose_directory_it_is(directory: Path) -> None:
    def about(path: Path) -> tuple[str, str]:
        return found("disk-directory", lambda: disk.directory(place(path)))

    assert about(directory)[0] == about(directory / "new")[0] == about(directory / "new" / "deep" / "er")[0] == "ok"
    assert not (directory / "new").exists()
    (directory / "file").touch()
    (directory / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        status, text = about(directory / name / "a" / "b")
        assert status == "fail" and f"may not make it in {directory}/{name}" in text and "mkdir -p" in text
    for bits in (0o770, 0o707, 0o722):
        directory.chmod(bits)
        status, text = about(directory)
        assert status == "fail" and f"{bits:04o}" in text
    directory.chmod(0o755)
    assert about(directory)[0] == "ok", "its files are private"
    assert about(directory / "file")[0] == "fail"
    if ROOT:
        os.chown(directory, 65534, 65534)
    status, text = about(directory if ROOT else Path("/usr"))
    assert status == "fail" and "belongs to the user" in text


def test_nothing_is_measured_in_a_directory_that_is_not_ours_alone(directory: Path) -> None:
    directory.chmod(0o777)
    names = [check.name for check in disk.all_of(settings(place(directory)), place(directory), directory)]
    assert names == ["disk-directory", "disk-filesystem"]


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm")
def test_memory_is_no_disk() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        where = place(Path(folder))
        status, text = found("disk-filesystem", lambda: disk.kind(where))
        assert status == "fail" and "tmpfs, which is memory" in text
        names = [check.name for check in disk.all_of(settings(where), where, Path("/"))]
        assert "disk-speed" not in names


@pytest.mark.parametrize(
    ("kind", "status"), [("nfs4", "fail"), ("fuse.sshfs", "fail"), ("xfs", "ok"), ("overlay", "warn")]
)
def test_what_the_directory_lies_on(tmp_path: Path, directory: Path, kind: str, status: str) -> None:
    table = tmp_path / "system/proc/self/mountinfo"
    table.parent.mkdir(parents=True)
    table.write_text(f"1 1 8:1 / / rw - ext4 a rw\n2 1 0:2 / {directory} rw - {kind} b rw\n")
    said = found("disk-filesystem", lambda: disk.kind(place(directory), tmp_path / "system"))
    assert said[0] == status and f"it is on {kind}" in said[1]


@pytest.fixture
def mounts(tmp_path: Path) -> list[str]:
    """A prefix for commands that then see `ro` read-only, an overlay `over`, `ram` without O_DIRECT, a small `full`."""
    for name in ("ro", "lower", "upper", "work", "over", "ram", "full"):
        (tmp_path / name).mkdir(0o700)
    script = f"""
        (
            cd {tmp_path} &&
            mount -t tmpfs -o mode=700 none work && mkdir work/up work/work &&
            mount --bind ro ro && mount -o remount,bind,ro ro &&
            mount -t ramfs -o mode=700 none ram && mount -t tmpfs -o size=64m,mode=700 none full &&
            mount -t overlay -o lowerdir=lower,upperdir=work/up,workdir=work/work none over
        ) && exec "$@"
    """
    unshare = shutil.which("unshare")
    wrap = [unshare or "unshare", *([] if ROOT else ["-r"]), "-m", "sh", "-c", script, "sh"]
    if unshare is None or subprocess.run([*wrap, "true"], capture_output=True).returncode != 0:
        pytest.skip("mounts cannot be made here")
    return wrap


def test_filesystems_that_are_really_mounted(tmp_path: Path, mounts: list[str]) -> None:
    code = (
        f"base = Path({str(tmp_path)!r})"
        + """
def at(name): return DiskPlace(base / name)
tell(disk.all_of(Settings(disk=[at("ro")]), at("ro"), base))
tell(disk.measured(at("ro")))
tell(places.home(base / "ro/x"))
tell(disk.directory(at("ro/new")))
tell(disk.kind(at("over")))
tell(disk.measured(at("ram")))
tell(disk.measured(at("full")))
"""
    )
    readonly, forced, home, new, overlay, ram, full = told(code, *mounts)
    assert readonly["disk-filesystem"][0] == "fail" and "mounted read-only" in readonly["disk-filesystem"][1]
    assert "disk-speed" not in readonly
    assert forced["disk-speed"][0] == "fail" and "Read-only" in forced["disk-speed"][1]
    assert home["home"][0] == "fail" and "may not write" in home["home"][1]
    assert new["disk-directory"][0] == "fail"
    assert overlay["disk-filesystem"][0] == "warn" and "vanishes with the container" in overlay["disk-filesystem"][1]
    assert ram["disk-speed"][0] == "warn" and "without O_DIRECT" in ram["disk-speed"][1]
    assert full["disk-speed"][0] == "warn" and "not measured" in full["disk-speed"][1]


def test_how_much_fits(directory: Path) -> None:
    of = os.statvfs(directory)
    free, total = of.f_bavail * of.f_frsize, of.f_blocks * of.f_frsize

    def about(size: str, *others: DiskPlace, **more: object) -> tuple[str, str]:
        where = place(directory, size)
        return found("disk-space", lambda: disk.space(settings(where, *others, **more), where))

    assert about("64MiB")[0] == "ok"
    status, text = about(str(free + (1 << 30)))
    assert (status, "the tier stops growing" in text) == (
        ("warn", True) if free + (1 << 30) <= total else ("fail", False)
    )
    assert about(str(total + 1))[0] == "fail"
    status, text = about("100%")  # the well refuses it, because of the reserve of 1 MiB
    assert status == "fail" and f"at most {(total >> 20) - 1}MiB" in text
    status, text = about("64MiB", disk_reserve="100%")
    assert status == "fail" and "fix: lower disk_reserve" in text
    status, text = about("63MiB")
    assert status == "fail" and "at least 64MiB" in text
    half = str(free * 3 // 5)
    assert about(half)[0] == "ok"
    status, text = about(half, place(directory.parent / "other", half))
    assert status != "ok" and "by 2 directories together" in text


@pytest.mark.parametrize("folder", ["/proc", "/proc/new/deep"])
def test_a_filesystem_without_room_for_files(folder: str) -> None:
    where = place(Path(folder))
    checks = list(disk.all_of(settings(where), where, Path("/")))
    assert {check.name for check in checks if check.status == "fail"} >= {"disk-filesystem"}
    check = one(disk.kind(where), "disk-filesystem")
    assert check.status == "fail" and "on proc, which has no room for files" in check.text
    assert {check.name for check in checks} & {"disk-space", "disk-speed"} == set()


def test_what_the_tier_holds_already_can_be_used(directory: Path) -> None:
    def usable() -> int:
        where = place(directory)
        facts = one(disk.space(settings(where), where), "disk-space").facts
        return int(facts["usable_bytes"]) - int(facts["free_bytes"])

    before = usable()
    (directory / "segment").write_bytes(bytes(1 << 20))
    (directory / "link").symlink_to("/proc/kcore")
    assert usable() - before == (directory / "segment").stat().st_blocks * 512 >= 1 << 20


def test_the_disk_is_measured_and_left_as_it_was(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = one(disk.measured(place(directory)), "disk-speed")
    assert float(check.facts["write_gb_s"]) > 0 and float(check.facts["read_gb_s"]) > 0, line(check)
    assert list(directory.iterdir()) == []
    assert one(disk.measured(place(directory / "new")), "disk-speed").facts.keys() == check.facts.keys()
    assert list(directory.iterdir()) == []
    monkeypatch.setattr(disk, "_SLOW_GB_S", 1e9)
    assert found("disk-speed", lambda: disk.measured(place(directory)))[0] == "warn"
    monkeypatch.setattr(os, "O_TMPFILE", 0)  # as on a filesystem that has no files without a name
    assert one(disk.measured(place(directory)), "disk-speed").facts.keys() == check.facts.keys()
    assert list(directory.iterdir()) == []


def test_a_device_that_does_not_answer_is_not_waited_for(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(speed, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(speed, "_measure", lambda _: release.wait(60))
    status, text = found("disk-speed", lambda: disk.measured(place(directory)))
    release.set()
    assert status == "fail" and "did not answer" in text


def test_where_the_keys_lie(directory: Path, tmp_path: Path) -> None:
    where = place(directory)

    def about(home: Path, **more: object) -> tuple[str, str]:
        return found("disk-key", lambda: disk.key_apart(settings(where, **more), where, home))

    status, text = about(tmp_path / "home")
    assert status == "warn" and "a thief of one has both" in text
    assert about(Path("/proc"))[0] == "ok"
    status, text = about(Path("/proc"), seal="plain")
    assert status == "warn" and "seal is plain" in text


def test_an_error_of_the_system_is_a_failed_check(tmp_path: Path) -> None:
    def broken() -> Iterator[Check]:
        yield Check("first", "ok", "fine")
        (tmp_path / "none").stat()

    first, second = guarded("second", broken, "/x")
    assert first.status == "ok"
    assert (second.name, second.status, second.of) == ("second", "fail", "/x") and "No such file" in second.text


def test_the_command_says_it_in_lines_in_json_and_by_its_status(home: Path, directory: Path) -> None:
    arguments = ["doctor", "--home", str(home)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert all(each.startswith(("ok    ", "warn  ")) for each in lines[:-1]) and lines[-1].endswith(" 0 fail")
    config = home.parent / "c.yaml"
    directory.chmod(0o777)
    config.write_text(f"disk: {directory}:1GiB")
    arguments += ["--config", str(config)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1 and any(each.startswith("fail  disk-directory ") for each in done.output.splitlines())
    done = CliRunner().invoke(app, [*arguments, "--json"])
    values = json.loads(done.output)
    assert (done.exit_code, values["ok"]) == (1, False)
    assert {tuple(check) for check in values["checks"]} == {("check", "status", "text", "fix", "of", "facts")}
    (bad,) = [check for check in values["checks"] if check["status"] == "fail"]
    assert (bad["check"], bad["of"]) == ("disk-directory", str(directory)) and "chmod" in bad["fix"]
