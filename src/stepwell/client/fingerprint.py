"""The weights fingerprint: which model this is, by the contents of its files and not by their name.

Every byte of every file is hashed. That takes seconds to minutes, so the engine side has it done by a process of its
own (`Fingerprint.start`) and answers misses until the result is there; hashes are remembered per file in home. What
the files are is the engine adapter's business. Run by itself: `python -m stepwell.client.fingerprint CACHE FILE...`.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import glob
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from blake3 import blake3

from stepwell.block.facts import lp
from stepwell.errors import IdentityMismatch
from stepwell.io.mounts import mounts, unstamped

CACHE_NAME = "fingerprints.json"
MAX_ENTRIES = 4096
_MAX_CACHE_BYTES = 4 << 20  # 4096 entries need about a quarter of this
_READ = 4 << 20
_ATTEMPTS = 3
_RACY_NS = 2_000_000_000
_NICE = 10
_POLL_S = 0.5
_VERSION = 2  # of the cache; 1 had hashes of files whose filesystem gives no proof, too
_LEFT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Known:
    """The 32 bytes."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class PendingFingerprint:
    """The files are still being read: the namespace is not known, so nothing may be recalled or spilled."""


@dataclass(frozen=True, slots=True)
class Failed:
    """There will be no fingerprint from this attempt; `reason` is one line for the log."""

    reason: str


Result = Known | PendingFingerprint | Failed


# --- hashing ---------------------------------------------------------------------------------


def fingerprint(files: Sequence[Path], cache: Path | None) -> bytes:
    """32-byte BLAKE3 over (name, length, content) of `files`, sorted by name relative to their common folder.

    The same files in another folder have the same fingerprint; a byte, a name or a file more or less gives another.
    Reads every file whose hash `cache` does not know. A hash is taken from the cache only if device, inode, size,
    mtime and ctime are all unchanged (contents cannot be changed without a new ctime), and is put there only if that
    ctime is at least 2 s old, as a later change could otherwise bear the same time. A file whose filesystem gives no
    such proof (`unstamped`) is always read. An unusable cache costs time only.

    Blocks for as long as the reading takes. Raises IdentityMismatch (SW-403) if there are no files, if one cannot be
    read, or if one is still being changed at the third attempt.
    """
    paths = sorted({Path(os.path.abspath(file)) for file in files})
    if not paths:
        raise _failed("there are no weight files to read")
    root = os.path.commonpath([path.parent for path in paths])
    known = _load(cache) if cache else {}
    found: dict[str, str] = {}
    table = mounts()
    hasher = blake3(lp(b"stepwell weights 1"))
    for name, path in sorted((os.fsencode(os.path.relpath(path, root)), path) for path in paths):
        proof = not unstamped(path, table)
        size, content = _file(path, known if proof else {}, found if proof else {})
        hasher.update(lp(name) + lp(size.to_bytes(8, "big")) + lp(content))
    if cache and any(key not in known for key in found):
        _store(cache, found)
    return hasher.digest()


def _file(path: Path, known: dict[str, str], found: dict[str, str]) -> tuple[int, bytes]:
    """Length and content hash of one file; notes in `found` what may be cached."""
    try:
        for _ in range(_ATTEMPTS):
            before = os.stat(path)
            key = _key(before)
            if key in known:
                found[key] = known[key]
                return before.st_size, bytes.fromhex(known[key])
            length, content = _read(path)
            # By path once more: a file renamed over this one while it was read counts as a change.
            if length == before.st_size and _key(os.stat(path)) == key:
                if time.time_ns() - before.st_ctime_ns > _RACY_NS:
                    found[key] = content.hex()
                return length, content
    except OSError as error:
        raise _failed(f"{path.name} could not be read: {error.strerror or error}") from error
    raise _failed(f"{path.name} kept changing while it was read ({_ATTEMPTS} attempts)")


def _read(path: Path) -> tuple[int, bytes]:
    """Plain reads rather than a mapping: a file cut short meanwhile is a change to report, not a SIGBUS."""
    hasher = blake3()
    length = 0
    buffer = memoryview(bytearray(_READ))
    with open(path, "rb", buffering=0) as file:
        while got := file.readinto(buffer):
            hasher.update(buffer[:got])
            length += got
    return length, hasher.digest()


def _key(stat: os.stat_result) -> str:
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def _failed(why: str) -> IdentityMismatch:
    return IdentityMismatch(
        "SW-403",
        what="the model's weights could not be identified",
        why=why,
        fix="make the files readable and leave them unchanged while the engine starts, or set `weights_id`",
    )


# --- the cache -------------------------------------------------------------------------------


class _Cache(msgspec.Struct, frozen=True):
    """Contents of `fingerprints.json`: key of a file's state to the hash of its content, oldest first."""

    version: int
    hashes: dict[str, str]


def _load(cache: Path) -> dict[str, str]:
    """Empty if the file is absent, foreign, oversized or damaged: then everything is read again."""
    try:
        descriptor = os.open(cache, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            if os.fstat(descriptor).st_uid != os.geteuid():
                return {}
            stored = msgspec.json.decode(file.read(_MAX_CACHE_BYTES), type=_Cache)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return {}
    if stored.version != _VERSION or not all(_is_hash(value) for value in stored.hashes.values()):
        return {}
    return stored.hashes


def _is_hash(text: str) -> bool:
    return len(text) == 64 and all(letter in "0123456789abcdef" for letter in text)


def _store(cache: Path, found: dict[str, str]) -> None:
    """Adds `found` as the newest entries and replaces the file in one step.

    Two writers at once may lose one's entries, never damage the file; a killed one leaves its new file, which the next
    writes over. A home that cannot be written is no error here.
    """
    new = cache.with_name(f".{cache.name}.new")
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    with contextlib.suppress(OSError):
        cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # of an engine that joins a well of another home
        with open(os.open(new, flags, 0o600), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.fileno()), os.lstat(new)):
                return  # another has just made it the cache
            try:
                file.truncate()
                file.write(_with(_load(cache), found))
                file.flush()
                os.replace(new, cache)
            except OSError:
                new.unlink()
                raise
        _tidy(cache)


def _with(known: dict[str, str], found: dict[str, str]) -> bytes:
    merged = {key: value for key, value in known.items() if key not in found} | found
    return msgspec.json.encode(_Cache(version=_VERSION, hashes=dict(list(merged.items())[-MAX_ENTRIES:])))


def _tidy(cache: Path) -> None:
    """Deletes what killed writers of earlier versions have left, each under a name of its own."""
    for left in cache.parent.glob(f".{glob.escape(cache.name)}.????????"):
        if time.time() - left.lstat().st_mtime > _LEFT_S:
            left.unlink()


# --- in the background -----------------------------------------------------------------------


class Fingerprint:
    """A fingerprint on its way, computed by a child process at low priority.

    The owner asks `result()` as often as it likes and calls `close()` when it no longer wants to know. The child ends
    with the process that started it, however that ends. Thread-safe.
    """

    def __init__(self) -> None:
        self._result: Result = PendingFingerprint()
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, files: Sequence[Path], cache: Path | None) -> Fingerprint:
        """Begins to fingerprint `files`; returns within the time a fork takes. Never raises: see `result()`."""
        self = cls()
        command = [sys.executable, "-P", "-m", "stepwell.client.fingerprint", "--parent", str(os.getpid()), "--"]
        command += [os.path.abspath(cache) if cache else "", *(os.path.abspath(file) for file in files)]
        # The child must find the very package that runs here, wherever this process got it from.
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                close_fds=True,
                cwd="/",
                env={**os.environ, "PYTHONPATH": path},
            )
        except OSError as error:
            self._settle(Failed(f"the fingerprint process did not start: {error.strerror or error}"))
            return self
        threading.Thread(target=self._wait, args=(self._child,), name="stepwell-fingerprint", daemon=True).start()
        return self

    def result(self) -> Result:
        """What is known now. Never blocks; once it is not PendingFingerprint it stays as it is."""
        return self._result

    def close(self) -> None:
        """Kills the child if it still runs (the thread that waits for it reaps it). Idempotent, does not wait."""
        self._settle(Failed("closed before the weights were read"))
        if self._child is not None:
            self._child.kill()

    def _wait(self, child: subprocess.Popen[bytes]) -> None:
        try:
            out, err = child.communicate()
            result: Result = _outcome(child.returncode, out, err)
        except Exception as error:  # noqa: BLE001 - who asks for the result would ask for ever
            child.kill()
            result = Failed(f"the fingerprint process could not be heard: {error}")
        self._settle(result)

    def _settle(self, result: Result) -> None:
        with self._lock:
            if isinstance(self._result, PendingFingerprint):
                self._result = result


def _outcome(returncode: int, out: bytes, err: bytes) -> Known | Failed:
    text = out.decode("ascii", "replace").strip()
    if returncode == 0 and _is_hash(text):
        return Known(bytes.fromhex(text))
    if returncode < 0:
        return Failed(f"the fingerprint process was killed by signal {-returncode}")
    lines = err.decode("utf-8", "replace").strip().splitlines()
    return Failed(lines[-1][:500] if lines else f"the fingerprint process ended with status {returncode}")


def _end_with(parent: int) -> None:
    # Not PR_SET_PDEATHSIG: that fires when the *thread* that started us ends, and follows no re-parented engine.
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the fingerprint in hex; on failure one line on standard error and status 1."""
    parser = argparse.ArgumentParser(prog="python -m stepwell.client.fingerprint")
    parser.add_argument("--parent", type=int, help="process to end with")
    parser.add_argument("cache", metavar="CACHE", help="file to remember hashes in; '' for none")
    parser.add_argument("files", metavar="FILE", nargs="*", type=Path)
    options = parser.parse_args(arguments)
    if options.parent:
        threading.Thread(target=_end_with, args=(options.parent,), daemon=True).start()
        os.nice(_NICE)
        with contextlib.suppress(OSError):  # an engine binds itself to cores that we should not sit on
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        digest = fingerprint(options.files, Path(options.cache) if options.cache else None)
    except IdentityMismatch as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(digest.hex() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
