"""Which adapter a request runs with, by the content of its files and not by its name.

An engine's workers load an adapter at a time of their own: when it is registered, when it is first used, and again
whenever it was pushed out of their memory or is loaded in place. So its files are looked at before the first of these,
and must not have changed since whenever it matters: before its blocks are recalled, and before what was computed with
it is spilled. Everything else bypasses, and never waits: files still being read; files that were changed, and a name
or number that was given to another adapter (the engine's own cache goes on with pages of the former), until the engine
starts again; hub names; filesystems where a change may go unseen.
"""

from __future__ import annotations

import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from stepwell.block.facts import digest_of
from stepwell.client.fingerprint import Failed, Fingerprint, Known, PendingFingerprint
from stepwell.errors import IdentityMismatch, StepwellError
from stepwell.io.mounts import mounts, unstamped

MAX_ADAPTERS = 4096
"""Numbers and names of adapters that are remembered; requests with others bypass."""

_MAX_FILES = 64
_MAX_LINKS = 40
_SLACK_NS = 100_000_000  # the system stamps files by a clock that runs in ticks
_POLL_S = 0.02
# Beside those that engines read (adapter_config.json and adapter_model.*) whatever else looks like weights.
_READ = ("adapter_*", "*.safetensors", "*.bin", "*.pt", "*.pth")
_NOT_READ = ("optimizer*", "scheduler*", "training_args*", "rng_state*", "scaler*")
_CONFIG = "adapter_config.json"

State = tuple[tuple[str, int, int, int, int, int], ...]
"""Every link and file that decides the content, and the folder: path, device, inode, size, mtime, ctime. Folders above
are left out, as whatever comes beside it changes them: one that is renamed and renamed back is not noticed."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One whose content is known: `digest` stands for it, as long as `Adapters.holds` says so."""

    digest: bytes
    record: Record


@dataclass(frozen=True, slots=True)
class Unread:
    """Its files are being read: this request bypasses, a later one may not."""


@dataclass(frozen=True, slots=True)
class Unusable:
    """Its content cannot be known for certain, as long as this engine runs."""

    reason: str


class Record:
    """An adapter under its name and number, as its files were before the engine can have loaded it. `found` is written
    by the reading thread, `spoilt` by the scheduler's; if it is set, it counts."""

    __slots__ = ("folder", "form", "found", "path", "spoilt", "state")

    def __init__(self, path: str, form: str) -> None:
        self.path = path
        self.form = form
        self.folder = os.path.abspath(os.path.expanduser(path))  # as engines do with what is there
        self.state: State | None = None
        self.found: Adapter | Unread | Unusable = Unread()
        self.spoilt: Unusable | None = None


Read = Callable[[Sequence[Path], Callable[[], bool]], bytes | str]
"""Fingerprint of files, or why there is none. Blocks; the second argument tells when the result is not wanted any
more."""


class Adapters:
    """`facts`: of the engine's LoRA settings. For one thread, the scheduler's, beside one of its own that reads."""

    def __init__(
        self,
        facts: Mapping[str, str],
        cache: Path | None,
        trouble: Callable[[StepwellError], None],
        *,
        read: Read | None = None,
        threaded: bool = True,
    ) -> None:
        self._facts = dict(facts)
        self._trouble = trouble
        self._read = read or (lambda files, over: _fingerprint(files, cache, over))
        self._numbers: dict[int, Record] = {}
        self._names: dict[str, Record] = {}
        self._waiting: SimpleQueue[Record | None] = SimpleQueue()
        self._threaded = threaded
        self._thread: threading.Thread | None = None
        self._closed = False
        _watching.add(self)

    def of(self, request: Any) -> Adapter | Unread | Unusable:
        """The adapter that a request names by `lora_int_id`, `lora_name` and `lora_path`, as far as it is known at this
        moment. Never waits; takes 0.1 ms, a few at the first time."""
        record = self._seen(request)
        if record is None:
            return Unusable("too many adapters")
        if isinstance(record.found, Adapter):
            self.holds(record.found)
        return record.spoilt or record.found

    def holds(self, adapter: Adapter) -> bool:
        """Whether nothing has changed since before the engine first loaded it, so that all KV computed with it until
        now belongs to its digest. Once False, it stays False."""
        record = adapter.record
        if record.spoilt is None and _state(record.folder) != record.state:
            self._spoil(record, "its files have changed under the running engine")
        return record.spoilt is None

    def loading(self, request: Any) -> None:
        """Called when the engine is about to load it, or to load it again in place. Raises nothing."""
        try:
            self._seen(request)
        except Exception as error:  # noqa: BLE001 - the boundary to the engine, which goes on to load it
            for record in {*self._numbers.values(), *self._names.values()}:
                self._spoil(record, f"the engine loads one that cannot be followed: {error}")

    def close(self) -> None:
        _watching.discard(self)
        self._closed = True
        self._waiting.put(None)

    def _seen(self, request: Any) -> Record | None:
        """The record of the adapter that the request names; None if there is no room for another one."""
        number, name = request.lora_int_id, request.lora_name
        path, form = request.lora_path, str(getattr(request, "is_3d_lora_weight", False))
        by_number, by_name = self._numbers.get(number), self._names.get(name)
        record = by_number or by_name
        new = by_number is None or by_name is None
        if new and max(len(self._numbers), len(self._names)) >= MAX_ADAPTERS:
            if record is not None:  # the other one may have been anything's
                self._spoil(record, "its name or number came with one that there is no room to remember")
            return None
        if record is None:
            record = Record(path, form)
            self._begin(record)
        for other in (by_number, by_name):
            if other is not None and (other is not record or (other.path, other.form) != (path, form)):
                self._spoil(record, "its name or number was used for another one")
                self._spoil(other, "its name or number was used for another one")
        self._numbers[number] = self._names[name] = record
        return record

    def _spoil(self, record: Record, reason: str) -> None:
        if record.spoilt is None:
            record.spoilt = Unusable(reason)
            self._tell(reason)

    def _tell(self, reason: str) -> None:
        self._trouble(
            IdentityMismatch(
                "SW-405",
                what="requests with an adapter bypass stepwell",
                why=reason,
                fix="keep each version of an adapter in a local folder of its own that is never changed, and give it a"
                " name of its own; what was changed is served again when the engine is restarted",
            )
        )

    def _begin(self, record: Record) -> None:
        try:
            reason = self._look(record)
        except OSError as error:
            reason = f"its files cannot be read: {error.strerror or error}"
        if reason:
            self._spoil(record, reason)
            return
        if not self._threaded:
            self._examine(record)
            return
        self._waiting.put(record)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stepwell-adapters", daemon=True)
            self._thread.start()

    def _look(self, record: Record) -> str:
        """Why its files cannot be followed, or "". May take as long as its filesystem does: the engine is about to read
        the same files. Raises OSError."""
        if not os.path.isdir(record.folder):
            return "it is not a local folder"
        table = mounts()
        for path in (record.folder, *(f"{record.folder}/{name}" for name in _names(record.folder))):
            if kind := unstamped(Path(path), table):
                return f"its files are on a filesystem ({kind}) where changes may go unseen"
        now = time.time_ns()
        record.state = _state(record.folder)
        if record.state is None:
            return f"its folder has no {_CONFIG} with weights beside it, or too many files"
        if max(entry[-1] for entry in record.state) > now - _SLACK_NS:
            return "its files were changed at this moment"
        return ""

    def _run(self) -> None:
        while (record := self._waiting.get()) is not None:
            self._examine(record)

    def _examine(self, record: Record) -> None:
        try:
            digest = self._read([Path(record.folder, name) for name in _names(record.folder)], lambda: self._closed)
        except OSError as error:
            digest = f"its files cannot be read: {error.strerror or error}"
        if isinstance(digest, bytes):  # the engine has loaded the same, if files have not changed: `holds` looks again
            facts = {"files": digest.hex(), "form": record.form, **self._facts}
            record.found = Adapter(digest_of(facts), record)
        elif not self._closed:
            record.found = Unusable(digest)
            self._tell(digest)


_watching: weakref.WeakSet[Adapters] = weakref.WeakSet()


def loading(request: Any) -> None:
    """Tells all `Adapters` of this process that the engine is about to load the adapter of this request. Raises
    nothing."""
    for adapters in list(_watching):
        adapters.loading(request)


def _names(folder: str) -> list[str]:
    return sorted(
        name
        for name in os.listdir(folder)
        if any(fnmatch(name, pattern) for pattern in _READ) and not any(fnmatch(name, p) for p in _NOT_READ)
    )


def _state(folder: str) -> State | None:
    """State of the folder; None where it holds no adapter, or one with too many files."""
    try:
        names = _names(folder)
        if _CONFIG not in names or not any(name.startswith("adapter_model.") for name in names):
            return None
        if len(names) > _MAX_FILES:
            return None
        ways = [_way(folder), *(_way(f"{folder}/{name}") for name in names)]
        return tuple(_entry(path) for path in dict.fromkeys(step for way in ways for step in way))
    except OSError:
        return None


def _way(path: str) -> list[str]:
    """The symbolic links on the way to what `path` names, and that itself. Raises OSError."""
    found: list[str] = []
    at, rest = "/", path.split("/")[::-1]
    while rest:
        step = rest.pop()
        if step in ("", "."):
            continue
        if step == "..":
            at = os.path.dirname(at)
            continue
        here = os.path.join(at, step)
        if not stat.S_ISLNK(os.lstat(here).st_mode):
            at = here
            continue
        found.append(here)
        if len(found) > _MAX_LINKS:
            raise OSError(f"too many links to {path}")
        target = os.readlink(here)
        at = "/" if target.startswith("/") else at
        rest += target.split("/")[::-1]
    return [*found, at]


def _entry(path: str) -> tuple[str, int, int, int, int, int]:
    s = os.lstat(path)
    return path, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns


def _fingerprint(files: Sequence[Path], cache: Path | None, over: Callable[[], bool]) -> bytes | str:
    """Fingerprint of these files, read by a process of its own, or why there is none."""
    child = Fingerprint.start(files, cache)
    while isinstance(result := child.result(), PendingFingerprint):
        if over():
            child.close()
        time.sleep(_POLL_S)
    match result:
        case Known(digest):
            return digest
        case Failed(reason):
            return reason
