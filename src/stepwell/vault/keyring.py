"""The keyring: the tenants of a well and their keys, the one file that is fsynced.

The keys confirm guessed prompts and open sealed blocks, so the file is 0600, checked before it is believed, and never
shown. If it is corrupt or foreign it is reported and left exactly as it is: sealed blocks can be read again once it is
restored. `wrap`: the form of the keys in the file; "file" means plain, protected by the file's mode.

    {"format": "stepwell keyring", "version": 1, "wrap": "file",
     "tenants": [{"name": "default", "epochs": [{"number": 1, "key": <base64 of 32 bytes>}]}],   newest epoch first
     "checksum": <hex BLAKE3 of this file with an empty checksum>}

A file must equal, byte for byte, the output of `_render`. It only ever gains tenants: a tenant that is removed from the
settings keeps its keys, since its sealed blocks are still on disk. Only the well opens it, never an engine.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import blake3
import msgspec
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from stepwell.block.namespace import DEFAULT_TENANT
from stepwell.errors import AccessDenied, IntegrityError, Unsupported
from stepwell.io import private
from stepwell.vault.memory import KEY_BYTES, cells, wipe

_FORMAT = "stepwell keyring"
_VERSION = 1
_WRAP = "file"
_MAX_BYTES = 1 << 20
_ROOM = 1 << 14
_encoder = msgspec.json.Encoder()
_BLOCK_ID_CONTEXT = "stepwell 2026 block-id v1"


@dataclass(frozen=True, slots=True)
class Epoch:
    """One generation of a tenant's key; `number` grows with each rotation. Keys derived from it (BLAKE3 and HKDF, RFC
    5869) reveal neither it nor each other."""

    number: int
    key: bytes | memoryview = field(repr=False)  # bytes are copied into memory for keys

    def __post_init__(self) -> None:
        if isinstance(self.key, bytes):
            object.__setattr__(self, "key", cells.keep(self.key))

    @property
    def id_key(self) -> memoryview:
        """The 32-byte key of block ids."""
        hasher = blake3.blake3(derive_key_context=_BLOCK_ID_CONTEXT)
        hasher.update(self.key)  # not as an argument of the constructor, which leaves copies behind
        derived = cells.take(hasher.digest())
        hasher.update(bytes(2048))  # its buffer held the key
        return derived

    def segment_key(self, segment: bytes) -> tuple[memoryview, bytes]:
        """This tenant's AES-256 key for the segment with this id, and the commitment to it, which is public. 8 us."""
        return cells.take(self._expand(b"stepwell seg v1" + segment)), self._expand(b"stepwell commit v1" + segment)

    def _expand(self, info: bytes) -> bytes:
        return HKDFExpand(hashes.SHA256(), 32, info).derive(self.key)


@dataclass(frozen=True, slots=True)
class TenantKeys:
    """A tenant's keys, newest epoch first; never empty."""

    name: str
    epochs: tuple[Epoch, ...]

    @property
    def id_keys(self) -> tuple[memoryview, ...]:
        """The keys of block ids, one per epoch, newest first: new blocks use the first, lookups may try all."""
        return tuple(epoch.id_key for epoch in self.epochs)


@dataclass(frozen=True, slots=True)
class Keyring:
    """All tenants of one well, as read from its file."""

    tenants: tuple[TenantKeys, ...]

    @classmethod
    def open(cls, path: Path, tenants: Iterable[str] = (DEFAULT_TENANT,)) -> Keyring:
        """Reads the keyring at `path`, or makes one. It has keys for all of `tenants`: those without get new ones, and
        existing keys are never changed.

        Several processes may do so at once: each gets the keys that the others have added. New keys are on disk before
        this returns. Raises IntegrityError SW-303 (corrupt), AccessDenied SW-605 (unreadable, of another user, open to
        others, or cannot be written), Unsupported SW-711 (of another version).
        """
        wanted = tuple(tenants)
        try:
            if not os.path.lexists(path):
                _create(path, wanted)
            keyring = cls.read(path)
            names = {keys.name for keys in keyring.tenants}
            if not names.issuperset(wanted):
                keyring = _add(path, wanted)
            _remove_leftovers(path)
        except OSError as error:
            raise _denied(path, error.strerror or str(error)) from error
        return keyring

    @classmethod
    def read(cls, path: Path) -> Keyring:
        """The keyring at `path`, which must exist; nothing is created or removed. Raises as `open` does."""
        try:
            raw = _read(path)
        except OSError as error:
            raise _denied(path, error.strerror or str(error)) from error
        try:
            return cls(_parse(raw, path))
        finally:
            wipe(raw)

    @classmethod
    def ephemeral(cls, tenants: Iterable[str] = (DEFAULT_TENANT,)) -> Keyring:
        """A keyring with random keys that is never written: blocks that it seals are lost with this process."""
        return cls(tuple(TenantKeys(name, (Epoch(1, cells.take(secrets.token_bytes(KEY_BYTES))),)) for name in tenants))

    def tenant(self, name: str) -> TenantKeys:
        """The keys of tenant `name`. Raises AccessDenied SW-607 if it has none."""
        for keys in self.tenants:
            if keys.name == name:
                return keys
        raise AccessDenied(
            "SW-607",
            what="the keyring has no keys for this tenant",
            why="only tenants in the keyring can store or find blocks",
            fix=f"use a tenant that the well knows; a new keyring has one, called {DEFAULT_TENANT}",
        )


class _EpochRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    number: int
    key: bytes

    def __repr__(self) -> str:
        return f"_EpochRecord({self.number})"


class _TenantRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    epochs: list[_EpochRecord]


class _Head(msgspec.Struct, frozen=True):
    format: str
    version: int
    wrap: str


class _Record(_Head, frozen=True, forbid_unknown_fields=True):
    tenants: list[_TenantRecord]
    checksum: str


def _render(tenants: list[_TenantRecord]) -> bytearray:
    """The content of a keyring file; the caller wipes it."""
    bare = _Record(_FORMAT, _VERSION, _WRAP, tenants, checksum="")
    encoded = _encode(bare)
    checksum = blake3.blake3(encoded).hexdigest()
    wipe(encoded)
    return _encode(msgspec.structs.replace(bare, checksum=checksum), end=b"\n")


def _encode(record: _Record, end: bytes = b"") -> bytearray:
    """Encodes into one buffer of full size: one that grows would leave copies behind."""
    room = bytearray(_ROOM)
    _encoder.encode_into(record, room)
    room += end
    return room


def _parse(raw: bytearray, path: Path) -> tuple[TenantKeys, ...]:
    try:
        head = msgspec.json.decode(raw, type=_Head)
        if head.format == _FORMAT and (head.version, head.wrap) != (_VERSION, _WRAP):
            raise Unsupported(
                "SW-711",
                what=f"the keyring {path} has version {head.version} with wrap {head.wrap[:32]!r}",
                why=f"this release reads version {_VERSION} with wrap {_WRAP!r}",
                fix="use the release of stepwell that wrote it, or another STEPWELL_HOME",
            )
        record = msgspec.json.decode(raw, type=_Record)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise _corrupt(path, "it is not a keyring, or only a part of one") from None
    rendered = _render(record.tenants)
    same = rendered == raw
    wipe(rendered)
    if not same:
        raise _corrupt(path, "its checksum does not match its contents")
    names = [tenant.name for tenant in record.tenants]
    if len(set(names)) != len(names):
        raise _corrupt(path, "a tenant is listed twice")
    for tenant in record.tenants:
        numbers = [epoch.number for epoch in tenant.epochs]
        if not numbers or numbers != sorted(set(numbers), reverse=True):
            raise _corrupt(path, "the key epochs of a tenant are not in order")
        if any(len(epoch.key) != KEY_BYTES for epoch in tenant.epochs):
            raise _corrupt(path, "a key has the wrong length")
    return tuple(
        TenantKeys(t.name, tuple(Epoch(e.number, cells.take(e.key)) for e in t.epochs)) for t in record.tenants
    )


def _read(path: Path) -> bytearray:
    """The file's content; the caller wipes it."""
    try:
        return private.read(path, _MAX_BYTES)
    except private.NotPrivate as error:
        raise _denied(path, str(error)) from None
    except private.TooLarge:
        raise _corrupt(path, "it is larger than 1 MiB") from None


def _new(name: str) -> _TenantRecord:
    return _TenantRecord(name, [_EpochRecord(1, secrets.token_bytes(KEY_BYTES))])


def _create(path: Path, tenants: Iterable[str]) -> None:
    with _rendered(path, [_new(name) for name in tenants]) as content:
        private.create(path, content)


def _add(path: Path, tenants: Iterable[str]) -> Keyring:
    """Adds keys for those of `tenants` that have none. The file is replaced as a whole, by one process at a time, so
    that tenants which another process has added meanwhile are not lost."""
    with private.opened_folder(path.parent) as alone:
        fcntl.flock(alone, fcntl.LOCK_EX)
        known = Keyring.read(path).tenants
        records = [_TenantRecord(t.name, [_EpochRecord(e.number, bytes(e.key)) for e in t.epochs]) for t in known]
        have = {record.name for record in records}
        records += [_new(name) for name in dict.fromkeys(tenants) if name not in have]
        with _rendered(path, records) as content:
            temporary = private.write_beside(path, content)
        try:
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        private.sync_folder(path.parent)
        return Keyring.read(path)


@contextlib.contextmanager
def _rendered(path: Path, records: list[_TenantRecord]) -> Iterator[bytearray]:
    """The content of a keyring with these records; it and their keys are wiped afterwards."""
    content = _render(records)
    try:
        if len(content) > _MAX_BYTES:
            raise _denied(path, "it would be larger than 1 MiB")
        yield content
    finally:
        wipe(content)
        for epoch in (epoch for record in records for epoch in record.epochs):
            wipe(epoch.key)


def _remove_leftovers(path: Path) -> None:
    """Removes files that killed processes have left, unless a process is adding tenants at this moment. Files that
    cannot be removed do no harm."""
    with contextlib.suppress(OSError), private.opened_folder(path.parent) as alone:
        fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for leftover in private.leftovers(path):
            leftover.unlink(missing_ok=True)


def _corrupt(path: Path, why: str) -> IntegrityError:
    return IntegrityError(
        "SW-303",
        what=f"the keyring {path} is corrupt",
        why=why,
        fix="restore it from a copy, or move it away to start with new keys (what was sealed becomes unreadable)",
    )


def _denied(path: Path, why: str) -> AccessDenied:
    return AccessDenied(
        "SW-605",
        what=f"the keyring {path} is not used",
        why=why,
        fix="make it a regular file of your own with mode 0600, or set STEPWELL_HOME to another directory",
    )
