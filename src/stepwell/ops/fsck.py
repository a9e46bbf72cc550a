"""`stepwell cache fsck`: reads a directory of the disk tier and opens every block in it. It changes nothing.

Every frame is opened with the keys of a home, one at a time, so that memory stays bounded by the largest frame. A well
may run meanwhile: what it changes while we look is looked at again, and counted as `moved` where it is gone by then.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from stepwell.block.frame import AES_256_GCM, FrameHeader, frame_bytes, is_unknown
from stepwell.block.layout import PAGE
from stepwell.codecs.seal import NO_COMMITMENT, Opened, SegmentKey, expected_of, unseal
from stepwell.errors import AccessDenied
from stepwell.io.files import File, FilesToRead
from stepwell.io.memory import Bytes
from stepwell.io.staging import Staging
from stepwell.tiers.disk.recovery import LOCK, NAME, OURS, FileKind, FoundFile, NotAFile, look
from stepwell.units import format_size
from stepwell.vault.keyring import Keyring

PATIENCE_S = 2.0
"""Seconds between two reports of progress."""

_AGAIN, _AGAIN_S = 5, 0.1  # times and pauses that a write under way gets to end
_STAGING = 8 << 20


class BlockVerdict(Enum):
    """State of a block. The values are names in the report; the worst of a block's frames counts, the last value being
    the worst."""

    GOOD = "good"
    EXPIRED = "expired"
    NO_KEY = "no_key"  # sealed with a key that this home does not have
    UNKNOWN = "unknown"  # a later release wrote it
    DAMAGED = "damaged"


_WORST = list(BlockVerdict)
_KINDS = {
    FileKind.EMPTY: "empty",
    FileKind.STRANGE: "damaged",
    FileKind.HEADLESS: "damaged",
    FileKind.OTHER_VERSION: "other_version",
}


@dataclass(slots=True)
class FsckReport:
    """Result of a check. `segments` by kind: closed (with a footer), open (without: read from its frames), empty,
    other_version, damaged (its first page), unreadable (the system denied it). `blocks` by state; `moved`: blocks that
    the well removed during the check. `nbytes`: of all segments. `foreign_files`: all other files, as the well counts
    them."""

    directory: Path
    in_use: bool = False
    keyring: bool = False
    segments: Counter[str] = field(default_factory=Counter)
    blocks: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0
    block_bytes: int = 0
    moved: int = 0
    foreign_files: int = 0

    @property
    def ok(self) -> bool:
        """True if no block is damaged and everything could be read."""
        return not (self.blocks["damaged"] or self.segments["damaged"] or self.segments["unreadable"])


def examine(directory: Path, keyring: Path, tell: Callable[[str], None] = lambda line: None) -> FsckReport:
    """Reads the whole directory. `tell` gets a line of progress now and then. Raises AccessDenied SW-608 (no directory,
    not readable, or without a disk tier) and the errors of `Keyring.read`, unless there is no keyring at all: sealed
    blocks then count as without a key."""
    report = FsckReport(directory)
    try:
        files = FilesToRead(directory)
    except OSError as error:
        raise _unusable(directory, error) from error
    try:
        keys = Keyring.read(keyring) if os.path.lexists(keyring) else Keyring(())
        report.keyring = bool(keys.tenants)
        report.in_use = _in_use(directory)
        _Examination(files, keys, report, tell).run()
    except OSError as error:
        raise _unusable(directory, error) from error
    finally:
        files.close()
    return report


class _Examination:
    def __init__(self, files: FilesToRead, keyring: Keyring, report: FsckReport, tell: Callable[[str], None]) -> None:
        self._files = files
        self._epochs = [epoch for tenant in keyring.tenants for epoch in tenant.epochs]
        self._report = report
        self._tell = tell
        self._staging = Staging(_STAGING)
        self._told = time.monotonic()
        self._at = ""
        self._bytes = 0

    def run(self) -> None:
        report = self._report
        names = sorted(self._files.names())
        if LOCK not in names and not any(NAME.fullmatch(name) for name in names):
            raise _no_tier(report.directory)
        report.foreign_files = sum(not NAME.fullmatch(name) and name not in OURS for name in names)
        ours = [name for name in names if NAME.fullmatch(name)]
        for number, name in enumerate(ours, 1):
            self._at = f"segment {number} of {len(ours)}"
            try:
                self._segment(name)
            except FileNotFoundError:
                continue  # deleted meanwhile
            except NotAFile:
                report.foreign_files += 1
            except OSError:
                report.segments["unreadable"] += 1

    def _read(self, nbytes: int) -> None:
        self._bytes += nbytes
        if time.monotonic() - self._told >= PATIENCE_S:
            self._told = time.monotonic()
            self._tell(f"{self._at}, {format_size(self._bytes)} read, {self._report.blocks['damaged']} blocks damaged")

    def _segment(self, name: str) -> None:
        report, found = self._report, look(self._files, name, self._staging)
        kind = _KINDS.get(found.kind)
        report.segments[kind or ("closed" if found.closed else "open")] += 1
        report.nbytes += found.nbytes
        if found.head is None or found.footer is None:
            return
        verdicts: Counter[str] = Counter()
        nbytes = 0
        with self._files.open(name) as file:
            for verdict, length in self._blocks(file, found):
                verdicts[verdict.value] += 1
                nbytes += length
                self._read(length)
            if verdicts[BlockVerdict.DAMAGED.value] and self._changed(name, found):
                report.moved += verdicts.total()
                return
        report.blocks += verdicts
        report.block_bytes += nbytes

    def _changed(self, name: str, found: FoundFile) -> bool:
        """The well has given the file another life, or deleted it, while we read it."""
        try:
            again = look(self._files, name, self._staging)
        except OSError:
            return True
        return again.head is None or found.head is None or again.head.id != found.head.id

    def _blocks(self, file: File, found: FoundFile) -> Iterator[tuple[BlockVerdict, int]]:
        assert found.head is not None and found.footer is not None
        segment = found.head.id
        keys = {NO_COMMITMENT: SegmentKey(bytes(32), NO_COMMITMENT)}
        for epoch in self._epochs:
            key = SegmentKey(*epoch.segment_key(segment))
            keys[key.commitment] = key
        for record in found.footer.records:
            block, namespace = bytes(record["block"]), bytes(record["namespace"])
            first, end = int(record["page"]), int(record["page"]) + int(record["pages"])
            verdict = self._block(file, segment, block, namespace, first, end, keys)
            tries = 0 if found.closed or not self._report.in_use else _AGAIN
            while verdict is BlockVerdict.DAMAGED and tries:  # its write may be under way
                time.sleep(_AGAIN_S)
                tries -= 1
                verdict = self._block(file, segment, block, namespace, first, end, keys)
            yield verdict, (end - first) * PAGE

    def _block(
        self, file: File, segment: bytes, block: bytes, namespace: bytes, page: int, end: int,
        keys: dict[bytes, SegmentKey],
    ) -> BlockVerdict:  # fmt: skip
        """State of a block, from all its frames: one for each shard, in order, and nothing behind them."""
        worst, shard, shards = BlockVerdict.GOOD, 0, 1
        while page < end and worst is not BlockVerdict.DAMAGED:
            verdict, header = self._frame(file, segment, page, end, keys)
            if header is None:
                return verdict
            if (header.block, header.namespace, header.shard) != (block, namespace, shard):
                return BlockVerdict.DAMAGED
            worst = max(worst, verdict, key=_WORST.index)
            shard, shards = shard + 1, header.shards
            page += frame_bytes(header.payload) // PAGE
        return worst if (page, shard) == (end, shards) else BlockVerdict.DAMAGED

    def _frame(
        self, file: File, segment: bytes, page: int, end: int, keys: dict[bytes, SegmentKey]
    ) -> tuple[BlockVerdict, FrameHeader | None]:
        with self._staging.lend(PAGE) as buffer:
            got = file.read(buffer[:PAGE], page * PAGE)
            page_read = buffer[:got].tobytes()
        header = FrameHeader.parse(page_read)
        if header is None and is_unknown(page_read, segment):
            return BlockVerdict.UNKNOWN, None
        if header is None or frame_bytes(header.payload) > (end - page) * PAGE:
            return BlockVerdict.DAMAGED, None
        sealed = header.algorithm == AES_256_GCM
        key = keys.get(header.commitment)
        if key is None or sealed == (header.commitment == NO_COMMITMENT):
            return (BlockVerdict.NO_KEY if sealed else BlockVerdict.DAMAGED), header
        nbytes = frame_bytes(header.payload)
        with self._staging.lend(nbytes) as frame, self._staging.lend(header.payload) as payload:
            if file.read(frame[:nbytes], page * PAGE) != nbytes:
                return BlockVerdict.DAMAGED, header
            return _verdict(frame[:nbytes], segment, header, key, payload[: header.payload]), header


def _verdict(frame: Bytes, segment: bytes, header: FrameHeader, key: SegmentKey, payload: Bytes) -> BlockVerdict:
    opened = unseal(frame, replace(expected_of(header), segment=segment), key, payload, sealed=False, now=0)
    payload[:] = 0
    if opened is not Opened.GOOD:
        return BlockVerdict.DAMAGED
    return BlockVerdict.EXPIRED if header.expires and header.expires <= int(time.time()) else BlockVerdict.GOOD


def _in_use(directory: Path) -> bool:
    """True if a well holds the lock. A shared lock is taken for a moment to find out."""
    try:
        fd = os.open(directory / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return False
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno == errno.EWOULDBLOCK
    finally:
        os.close(fd)
    return False


def _unusable(directory: Path, error: OSError) -> AccessDenied:
    return AccessDenied(
        "SW-608",
        what=f"the directory {directory} cannot be examined",
        why=error.strerror or str(error),
        fix="name a directory of a disk tier, as the user whose well writes it",
    )


def _no_tier(directory: Path) -> AccessDenied:
    return AccessDenied(
        "SW-608",
        what=f"there is no disk tier in {directory}",
        why="it has no segments, and no lock file of a well",
        fix="name one of the directories that `stepwell config show` lists, or that --disk was given",
    )


def shape(report: FsckReport) -> dict[str, Any]:
    """The report as `--json` prints it."""
    kinds = ("closed", "open", "empty", "other_version", "damaged", "unreadable")
    return {
        "ok": report.ok,
        "directory": str(report.directory),
        "in_use": report.in_use,
        "keyring": report.keyring,
        "segments": {kind: report.segments[kind] for kind in kinds},
        "bytes": report.nbytes,
        "blocks": {verdict.value: report.blocks[verdict.value] for verdict in BlockVerdict},
        "block_bytes": report.block_bytes,
        "moved_blocks": report.moved,
        "foreign_files": report.foreign_files,
    }


def text(report: FsckReport, home: Path) -> str:
    """The report as lines for people."""
    lines = [
        f"{report.directory}: {_list(report.segments) or '0'} segments, {format_size(report.nbytes)}",
        f"blocks: {_list(report.blocks)}, {format_size(report.block_bytes)}" if report.blocks.total() else "0 blocks",
    ]
    if report.in_use:
        lines.append("a well is using it: what it was writing or deleting meanwhile may not be in these numbers")
    if report.moved:
        lines.append(f"{report.moved} blocks were gone before they were read: the well has used their segment again")
    if report.blocks["no_key"]:
        why = f"the keyring of {home} has no key for them" if report.keyring else f"there is no keyring in {home}"
        lines.append(f"{report.blocks['no_key']} blocks cannot be opened: {why} (--home names another)")
    if report.segments["other_version"]:
        lines.append(f"{report.segments['other_version']} segments are of another version of stepwell, and left alone")
    if report.foreign_files:
        lines.append(f"{report.foreign_files} files are not stepwell's, and left alone")
    damaged = report.blocks["damaged"] + report.segments["damaged"] + report.segments["unreadable"]
    lines.append(
        f"{damaged} damaged or not readable: they count as misses, and engines compute those blocks again"
        if damaged
        else "nothing is damaged"
    )
    return "\n".join(lines)


def _list(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {kind.replace('_', ' ')}" for kind, n in counts.items() if n)
