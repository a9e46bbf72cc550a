"""The kernel's FUSE protocol, as much of it as a pass-through needs: the system header linux/fuse.h, version 7.31.

Every request is a head, a fixed part that depends on its kind, and names or data. Every answer is a head and what the
kind asks for; forgetting and interrupting have none.
"""

from __future__ import annotations

import os
import struct
from enum import IntEnum

MAJOR, MINOR = 7, 31
ROOT = 1
"""The node of the mounted directory itself."""

MAX_TRANSFER = 1 << 20
"""Bytes of data in one request: 256 pages, the kernel's default maximum."""

BUFFER = MAX_TRANSFER + 4096
OUT_HEAD = struct.Struct("<IiQ")  # length of it all, minus an errno, the request's number
IN_HEAD = struct.Struct("<IIQQIIIHH")  # length, kind, number, node, uid, gid, pid, extensions, nothing

ENTRY = struct.Struct("<QQQQII")  # node, generation, how long name and attributes may be believed
ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
ATTRIBUTES_HEAD = struct.Struct("<QII")
COUNT = struct.Struct("<II")
CREATE, DIRENT, FALLOCATE, FSYNC = map(struct.Struct, ("<IIII", "<QQII", "<QQQII", "<QII"))
FORGET = struct.Struct("<QQ")
INIT_IN, INIT_OUT = struct.Struct("<IIII"), struct.Struct("<IIIIHHIIHH8I")
LSEEK, MKDIR, NUMBER, OPEN_IN = map(struct.Struct, ("<QQII", "<II", "<Q", "<II"))
OPEN_OUT = struct.Struct("<QII")
READ = struct.Struct("<QQIIQII")  # a write has the same fields
RENAME, RENAME2 = struct.Struct("<Q"), struct.Struct("<QII")
SETATTR = struct.Struct("<IIQQQQQQIIIIIIII")
STATFS = struct.Struct("<QQQQQIIIIIIIIII")
WRITTEN = struct.Struct("<II")

WANTED = 1 << 0 | 1 << 3 | 1 << 5 | 1 << 18 | 1 << 22
"""Features to use if the kernel offers them: several reads at a time, open with O_TRUNC, writes of more than a page,
parallel lookups, more than 32 pages a request."""

DIRECT_IO = 1  # in the answer to an open: every read and write comes to us, none is served from the page cache
SET_MODE, SET_UID, SET_GID, SET_SIZE, SET_FH = 1, 2, 4, 8, 64


class Op(IntEnum):
    """Kinds of requests. Others are answered with ENOSYS, which the kernel accepts."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    FALLOCATE = 43
    RENAME2 = 45
    LSEEK = 46


def attributes(status: os.stat_result) -> bytes:
    times = (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)
    return ATTRIBUTES.pack(
        status.st_ino,
        status.st_size,
        status.st_blocks,
        *(time // 10**9 for time in times),
        *(time % 10**9 for time in times),
        status.st_mode,
        status.st_nlink,
        status.st_uid,
        status.st_gid,
        status.st_rdev & 0xFFFFFFFF,
        status.st_blksize,
        0,
    )


def names(raw: bytes) -> list[str]:
    """The names at the end of a request, each with a zero behind it."""
    return [os.fsdecode(name) for name in raw.split(b"\0")[:-1]]
