"""Home, runtime directory and rendezvous: found where promised, and refused when others could reach into them."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from wells import refused

from stepwell.errors import AccessDenied, ConfigError
from stepwell.io import paths
from stepwell.io.paths import Rendezvous, filesystem, home_dir, prepare_home, runtime_dir

ROOT = os.geteuid() == 0
NOBODY = 65534


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A directory of another user, with nothing else wrong."""
    if not ROOT:
        return Path("/usr")
    directory = tmp_path / "foreign"
    directory.mkdir(0o700)
    os.chown(directory, NOBODY, NOBODY)
    return directory


@pytest.fixture(params=[0, 0o077, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    old = os.umask(request.param)
    yield request.param
    os.umask(old)


def test_where_home_is() -> None:
    env = {"STEPWELL_HOME": "/a", "XDG_DATA_HOME": "/data", "HOME": "/u"}
    assert home_dir(env) == Path("/a")
    assert home_dir(env | {"STEPWELL_HOME": ""}) == Path("/data/stepwell")
    assert home_dir({"XDG_DATA_HOME": "data", "HOME": "/u"}) == Path("/u/.local/share/stepwell")
    assert home_dir({}).is_absolute()
    refused("SW-102", lambda: home_dir({"STEPWELL_HOME": "a/b"}), "absolute")
    refused("SW-102", lambda: home_dir({"HOME": "u"}))


def test_home_is_made_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    home = tmp_path / "home"
    prepare_home(home)
    prepare_home(home)
    assert mode(home) == 0o700
    assert mode(home / "README.txt") == 0o600 & ~umask
    assert os.listdir(home) == ["README.txt"]


def test_home_tells_strangers_what_it_is_and_keeps_what_is_there(tmp_path: Path) -> None:
    prepare_home(tmp_path / "new" / "home")
    readme = tmp_path / "new" / "home" / "README.txt"
    assert "only a cache" in readme.read_text()
    readme.write_text("mine")
    prepare_home(readme.parent)
    assert readme.read_text() == "mine"


@pytest.mark.parametrize("bits", [0o770, 0o702, 0o720], ids=oct)
def test_a_home_that_others_can_write_is_refused(tmp_path: Path, bits: int) -> None:
    tmp_path.chmod(bits)
    refused("SW-602", lambda: prepare_home(tmp_path), f"{bits:04o}")
    assert os.listdir(tmp_path) == []


def test_a_home_that_others_can_only_read_is_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    prepare_home(tmp_path)
    assert mode(tmp_path) == 0o755


def test_a_foreign_home_is_refused(foreign: Path) -> None:
    refused("SW-602", lambda: prepare_home(foreign), "belongs to the user")


def test_a_home_that_is_a_link_or_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    refused("SW-602", lambda: prepare_home(tmp_path / "link"), "symbolic link")
    refused("SW-602", lambda: prepare_home(tmp_path / "file"), "not a directory")


def test_a_home_that_cannot_be_made_or_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused("SW-601", lambda: prepare_home(tmp_path / "file" / "home"))
    refused("SW-601", lambda: prepare_home(Path("/proc/stepwell")))
    refused("SW-601", lambda: prepare_home(Path(f"/proc/{os.getpid()}")))
    refused("SW-601", lambda: prepare_home(Path("/a\0b")))


def test_a_home_without_permission_is_refused(tmp_path: Path) -> None:
    """In a child that has given up root, to which permissions mean nothing."""
    home = tmp_path / "home"
    prepare_home(home)
    home.chmod(0o500)
    if ROOT:
        os.chown(home, NOBODY, NOBODY)
        tmp_path.chmod(0o711)
    child = os.fork()
    if child == 0:
        status = 99
        try:
            if ROOT:
                os.chdir(tmp_path)  # the folders above are root's alone
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
                home = Path("home")
            prepare_home(home)
            status = 0
        except AccessDenied as error:
            status = int(error.code.removeprefix("SW-")) - 600
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    home.chmod(0o700)


def fake_mounts(system: Path, *mounts: tuple[Path | str, str]) -> Path:
    (system / "proc/self").mkdir(parents=True)
    lines = ["garbage", "1 0 8:1 / / rw - ext4 /dev/root rw"]
    for number, (point, kind) in enumerate(mounts, 2):
        escaped = str(point).replace(" ", "\\040")
        lines.append(f"{number} 1 0:{number} / {escaped} rw,noatime shared:1 - {kind} source rw")
    (system / "proc/self/mountinfo").write_text("\n".join(lines))
    return system


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "lustre", "fuse.sshfs"])
def test_a_home_on_a_network_filesystem_is_refused(tmp_path: Path, kind: str) -> None:
    home = tmp_path / "a share" / "home"
    system = fake_mounts(tmp_path / "system", (home.parent, kind))
    refused("SW-603", lambda: prepare_home(home, system), kind)
    assert os.listdir(home) == []


def test_the_filesystem_is_that_of_the_innermost_and_latest_mount(tmp_path: Path) -> None:
    system = fake_mounts(
        tmp_path / "system", ("/data", "nfs"), ("/data/local", "xfs"), ("/twice", "nfs"), ("/twice", "tmpfs")
    )
    assert filesystem(Path("/data/x"), system) == "nfs"
    assert filesystem(Path("/data"), system) == "nfs"
    assert filesystem(Path("/data/local/x"), system) == "xfs"
    assert filesystem(Path("/data/locality"), system) == "nfs"
    assert filesystem(Path("/database"), system) == "ext4"
    assert filesystem(Path("/twice/x"), system) == "tmpfs"
    assert filesystem(Path("/x"), tmp_path / "nothing") == ""
    prepare_home(tmp_path / "home", tmp_path / "nothing")


def test_the_real_mounts_are_understood() -> None:
    assert filesystem(Path("/proc/self")) == "proc"


def test_the_users_runtime_directory_is_used_if_it_is_private(tmp_path: Path) -> None:
    base, temporary = tmp_path / "run", tmp_path / "tmp"
    base.mkdir(0o700)
    temporary.mkdir()
    env = {"XDG_RUNTIME_DIR": str(base), "TMPDIR": str(temporary)}
    assert runtime_dir(env) == base / "stepwell"
    assert mode(base / "stepwell") == 0o700
    fallback = temporary / f"stepwell-{os.geteuid()}"
    base.chmod(0o750)
    assert runtime_dir(env) == fallback
    assert mode(fallback) == 0o700
    assert runtime_dir(env | {"XDG_RUNTIME_DIR": ""}) == fallback
    assert runtime_dir(env | {"XDG_RUNTIME_DIR": str(tmp_path / "none")}) == fallback
    assert runtime_dir(env | {"XDG_RUNTIME_DIR": os.path.relpath(tmp_path)}) == fallback


def test_a_foreign_users_runtime_directory_is_not_used(tmp_path: Path, foreign: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(foreign), "TMPDIR": str(tmp_path)}
    assert runtime_dir(env).parent == tmp_path


def test_the_runtime_directory_is_made_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    assert mode(runtime_dir({"TMPDIR": str(tmp_path)})) == 0o700


@pytest.mark.skipif(not ROOT, reason="only root can give a directory to another user")
def test_a_runtime_directory_that_another_user_made_first_is_refused(tmp_path: Path) -> None:
    env = {"TMPDIR": str(tmp_path)}
    os.chown(runtime_dir(env), NOBODY, NOBODY)
    refused("SW-604", lambda: runtime_dir(env), f"user with id {NOBODY}")


@pytest.mark.parametrize("bits", [0o750, 0o701, 0o777], ids=oct)
def test_a_runtime_directory_that_is_open_to_others_is_refused(tmp_path: Path, bits: int) -> None:
    env = {"TMPDIR": str(tmp_path)}
    runtime_dir(env).chmod(bits)
    refused("SW-604", lambda: runtime_dir(env), f"{bits:04o}")


def test_a_runtime_directory_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    env = {"TMPDIR": str(tmp_path)}
    place = tmp_path / f"stepwell-{os.geteuid()}"
    (tmp_path / "real").mkdir(0o700)
    place.symlink_to(tmp_path / "real")
    refused("SW-604", lambda: runtime_dir(env), "symbolic link")
    place.unlink()
    place.touch(0o600)
    refused("SW-604", lambda: runtime_dir(env), "not a directory")
    refused("SW-604", lambda: runtime_dir({"TMPDIR": str(tmp_path / "none")}), "No such file")


def test_everyone_who_means_a_home_meets_at_one_place(tmp_path: Path) -> None:
    home, run = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    (tmp_path / "link").symlink_to(home)
    meeting = Rendezvous.of(home, run)
    assert meeting == Rendezvous.of(tmp_path / "link", run) == Rendezvous.of(home / ".." / "home", run)
    assert meeting != Rendezvous.of(tmp_path / "other", run)
    assert meeting.socket.parent == meeting.lock.parent == run
    assert meeting.socket.stem == meeting.lock.stem
    assert len(meeting.socket.stem) == 16
    # Engines and wells of different releases must agree on the name.
    assert Rendezvous.of(Path("/a/fixed/home"), run).socket.name == "4a64617233368123.sock"


def test_a_socket_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    longest = paths._SOCKET_PATH_BYTES - len("/0123456789abcdef.sock")
    assert Rendezvous.of(tmp_path, Path("/" + "x" * (longest - 1)))
    with pytest.raises(ConfigError) as caught:
        Rendezvous.of(tmp_path, Path("/" + "x" * longest))
    assert caught.value.code == "SW-109"
    refused("SW-109", lambda: Rendezvous.of(tmp_path, Path("/" + "é" * (longest // 2 + 1))))


def test_the_limit_is_that_of_the_system() -> None:
    longest = b"/none/" + b"x" * (paths._SOCKET_PATH_BYTES - len(b"/none/"))
    with socket.socket(socket.AF_UNIX) as probe:
        with pytest.raises(FileNotFoundError):
            probe.bind(longest)
        with pytest.raises(OSError, match="too long"):
            probe.bind(longest + b"x")
