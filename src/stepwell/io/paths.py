"""Paths of a well: its home, the runtime directory, and the rendezvous of the two.

Home holds the files that outlive the well (keyring, log, an optional stepwell.yaml). Socket and lock lie in a per-boot
runtime directory, named by a hash of home's real path, so that all processes with the same home find the same well.
Every directory is checked before it is trusted, since a user who can write there could pose as the well. Used by both
sides of the socket; standard library only.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stepwell.errors import AccessDenied, ConfigError
from stepwell.io.mounts import SYSTEM, covering, mounts

_SOCKET_PATH_BYTES = 107  # sun_path has 108 bytes, one of them the closing NUL
NETWORK = frozenset({
    "afs", "beegfs", "ceph", "cifs", "coda", "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.juicefs", "fuse.s3fs",
    "fuse.sshfs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "orangefs", "pvfs2", "smb3", "smbfs", "wekafs",
})  # fmt: skip
"""Filesystems that other hosts may share, as `filesystem` names them."""
MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
OVERLAY = frozenset({"overlay", "fuse.fuse-overlayfs", "aufs"})
"""Filesystems of a container of its own: files there are lost with it."""
_README = """\
This directory is the home of a stepwell, a cache for the KV blocks of LLM inference.

It holds the keys that seal cached blocks (keyring), a list of the directories where
those lie (disks.json), a log, and the settings if you wrote any (stepwell.yaml). The
key to contexts that you saved yourself is longctx.key.
It is only a cache: once no `stepwell serve` is running, this directory may be deleted.
Engines then recompute what was cached, nothing else is lost. Blocks on disk can never
be read again without the keyring, so rather let `stepwell uninstall` delete both. Do
not copy the keyring to others: it opens what is cached.
"""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The two files by which a home's well is found and kept single."""

    socket: Path
    lock: Path

    @classmethod
    def of(cls, home: Path, runtime: Path) -> Rendezvous:
        """The rendezvous for `home`, however its path is spelt. Raises ConfigError SW-109 if the path is too long."""
        name = hashlib.blake2b(os.fsencode(os.path.realpath(home)), digest_size=8).hexdigest()
        socket = runtime / f"{name}.sock"
        check_length(socket, "point XDG_RUNTIME_DIR or TMPDIR to a directory with a shorter path")
        return cls(socket, runtime / f"{name}.lock")

    @classmethod
    def named(cls, socket: Path) -> Rendezvous:
        """The rendezvous of a well that listens at a socket chosen by its operator. Raises ConfigError SW-109."""
        check_length(socket, "give the well a socket with a shorter path, such as /run/stepwell/well.sock")
        return cls(socket, socket.with_name(f"{socket.name}.lock"))


def check_length(socket: Path, fix: str) -> None:
    """Raises ConfigError SW-109 if the system cannot listen at this path."""
    if len(os.fsencode(socket)) > _SOCKET_PATH_BYTES:
        raise ConfigError(
            "SW-109",
            what=f"the socket path {socket} is too long",
            why=f"the system allows {_SOCKET_PATH_BYTES} bytes",
            fix=fix,
        )


def home_dir(env: Mapping[str, str]) -> Path:
    """The home that `env` means: $STEPWELL_HOME, else $XDG_DATA_HOME/stepwell, else ~/.local/share/stepwell.

    Nothing is created. An empty variable counts as unset, and a relative $XDG_DATA_HOME is ignored, as its
    specification wants. Raises ConfigError SW-102 for a relative $STEPWELL_HOME or where there is no user directory.
    """
    if named := env.get("STEPWELL_HOME"):
        home = Path(named)
    elif os.path.isabs(data := env.get("XDG_DATA_HOME", "")):
        home = Path(data) / "stepwell"
    else:
        home = Path(env.get("HOME") or os.path.expanduser("~")) / ".local/share/stepwell"
    if home.is_absolute():
        return home
    raise ConfigError(
        "SW-102",
        what=f"the home {home} is not an absolute path",
        why="engine and well may run in different directories and would not mean the same home",
        fix="set STEPWELL_HOME to an absolute path",
    )


def prepare_home(home: Path, system: Path = SYSTEM) -> None:
    """Creates `home` (0700) if it is missing, checks that it is safe to keep keys in, and leaves a README in it.

    Raises AccessDenied: SW-601 (cannot be created, read or written), SW-602 (belongs to another user, can be written by
    group or others, or is a symbolic link), SW-603 (on a network filesystem). `system` replaces "/" in tests.
    """
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        _make_private(home)
    except (OSError, ValueError) as error:
        raise _unusable(home, getattr(error, "strerror", None) or str(error)) from error
    check_home(home, system)
    try:
        fd = os.open(home / "README.txt", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    except OSError as error:
        raise _unusable(home, error.strerror or str(error)) from error
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(_README)


def check_home(home: Path, system: Path = SYSTEM) -> None:
    """Checks an existing home as `prepare_home` does, and creates nothing. Raises as it does."""
    try:
        status = home.lstat()
    except (OSError, ValueError) as error:
        raise _unusable(home, getattr(error, "strerror", None) or str(error)) from error
    if why := _unsafe(status, stat.S_IWGRP | stat.S_IWOTH):
        raise AccessDenied(
            "SW-602",
            what=f"home {home} is not safe",
            why=why,
            fix="set STEPWELL_HOME to a directory of your own with mode 0700",
        )
    kind = filesystem(home, system)
    if kind in NETWORK:
        raise AccessDenied(
            "SW-603",
            what=f"home {home} is on a network filesystem ({kind})",
            why="locks and the durability of the keyring are not reliable there, and other hosts would share it",
            fix="set STEPWELL_HOME to a directory on a local disk",
        )
    if not os.access(home, os.R_OK | os.W_OK | os.X_OK):
        raise _unusable(home, "you may not read and write in it")


def runtime_dir(env: Mapping[str, str]) -> Path:
    """The directory for sockets and locks, created 0700 and checked.

    $XDG_RUNTIME_DIR/stepwell if that variable names a directory of ours with mode 0700, else stepwell-<uid> in $TMPDIR
    or /tmp. Raises AccessDenied SW-604 if it belongs to another user, is open to others, is a symbolic link, or
    cannot be created.
    """
    uid = os.geteuid()
    base = Path(env.get("XDG_RUNTIME_DIR", ""))
    directory = base / "stepwell" if _is_private(base) else Path(env.get("TMPDIR") or "/tmp") / f"stepwell-{uid}"
    try:
        _make_private(directory)
        why = _unsafe(directory.lstat(), stat.S_IRWXG | stat.S_IRWXO)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
    if why:
        raise AccessDenied(
            "SW-604",
            what=f"the runtime directory {directory} cannot be used",
            why=why,
            fix="remove it if it is yours, or set XDG_RUNTIME_DIR to a directory of your own with mode 0700",
        )
    return directory


def check_socket_dir(socket: Path, *, shared: bool) -> None:
    """Raises AccessDenied SW-604 if a well cannot safely listen at `socket`: the directory must belong to this user,
    and others must not be able to put a socket there. `shared`: its group may, as its owner has decided."""
    directory = socket.parent
    try:
        why = _unsafe(directory.stat(), stat.S_IWOTH if shared else stat.S_IWGRP | stat.S_IWOTH)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
    if why:
        raise AccessDenied(
            "SW-604",
            what=f"the well cannot listen in {directory}",
            why=why,
            fix="make a new directory that is the well's user's own, and put the socket there: "
            f"install -d -m 0750 -o USER -g GROUP {shlex.quote(str(_unused(directory)))}",
        )


def _unused(directory: Path) -> Path:
    """`directory`, or a path that does not exist yet: an existing one may be the system's, like /tmp, and changing its
    owner on our advice would break the machine."""
    others = (Path(f"/run/stepwell{number or ''}") for number in itertools.count())
    return next(path for path in itertools.chain([directory], others) if not os.path.lexists(path))


def trusted_owners(socket: Path) -> set[int]:
    """Users whose well at `socket` can be trusted: this user, and the owner of its directory if only the owner, the
    owner's group and root could have put the socket there."""
    owners = {os.geteuid()}
    try:
        directory = Path(os.path.realpath(socket.parent))
        owner = directory.stat().st_uid
        above = [folder.stat() for folder in (directory, *directory.parents)]
    except (OSError, ValueError):
        return owners
    if all(s.st_uid in (0, owner, *owners) and not s.st_mode & stat.S_IWOTH for s in above):
        owners.add(owner)
    return owners


def filesystem(path: Path, system: Path = SYSTEM) -> str:
    """The kernel's name of the filesystem that holds `path`, "" if unknown. `system` replaces "/" in tests."""
    mount = covering(os.path.realpath(path), mounts(system))
    return mount.kind if mount is not None else ""


def _make_private(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        return
    directory.chmod(0o700)  # whatever the umask took away


def _is_private(directory: Path) -> bool:
    try:
        status = directory.stat()
    except (OSError, ValueError):
        return False
    return directory.is_absolute() and not _unsafe(status, stat.S_IRWXG | stat.S_IRWXO)


def _unsafe(status: os.stat_result, forbidden: int) -> str:
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link, which could be turned elsewhere"
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a directory"
    if status.st_uid != os.geteuid():
        return f"it belongs to the user with id {status.st_uid}, not to {os.geteuid()}"
    if status.st_mode & forbidden:
        return f"its mode is {stat.S_IMODE(status.st_mode):04o}, so others could put files there"
    return ""


def _unusable(home: Path, why: str) -> AccessDenied:
    return AccessDenied(
        "SW-601",
        what=f"home {home} cannot be used",
        why=why,
        fix="set STEPWELL_HOME to a directory that you can create, read and write",
    )
