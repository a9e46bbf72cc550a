"""Errors that a person can act on: what happened, why, and how to fix it, with a stable code.

Each place that raises names its own code from the one table below; `docs/errors.md` is checked against it. The
hundreds of a code are its class, so a log line can be searched by either. This module holds no policy: whether an
error becomes a counted miss, an inert connector or an exit status is decided where it is caught. Standard library
only, because every layer imports it, the engine side included.
"""

from __future__ import annotations

from typing import ClassVar


def _table(*rows: tuple[str, str]) -> dict[str, str]:
    table: dict[str, str] = {}
    for code, meaning in rows:
        if code in table:
            raise ValueError(f"{code} is given to two meanings: {table[code]!r} and {meaning!r}")
        table[code] = meaning
    return table


# A code is never reused for another meaning: people search for them years later.
CODES = _table(
    # 1xx ConfigError: what a person wrote
    ("SW-101", "a setting with this name does not exist"),
    ("SW-102", "a setting's value cannot be used"),
    ("SW-103", "a named configuration file cannot be read"),
    ("SW-104", "a STEPWELL_ environment variable does not exist"),
    ("SW-105", "a configuration file is not one YAML mapping"),
    ("SW-106", "the host tier is larger than the memory this process may use"),
    ("SW-107", "the host tier is too small to hold a slab"),
    ("SW-109", "a path is too long for a Unix socket"),
    ("SW-110", "the engine plugin could not be registered, or was registered twice"),
    ("SW-111", "the running well has other settings than were asked for (warning)"),
    ("SW-112", "the demo's model or documents cannot be used"),
    ("SW-113", "a program or package that this command needs is not installed"),
    ("SW-114", "the disk tier's size cannot work on its filesystem"),
    ("SW-115", "a description of hardware or of a model for the cost of prefill is impossible or unknown"),
    ("SW-119", "the metrics of the well cannot be served at their address"),
    ("SW-121", "a trace, its format, or a generator or its parameter is not known"),
    ("SW-122", "a trace or a generator's parameter cannot be used"),
    ("SW-123", "a file cannot take the rows of a simulation or of an accuracy run"),
    ("SW-124", "a policy is not known"),
    ("SW-125", "a capacity to simulate cannot be used"),
    ("SW-126", "the description of a fleet is impossible"),
    ("SW-127", "a sweep cannot be spread over a Ray cluster"),
    ("SW-128", "the tasks or policies of an accuracy run cannot be used"),
    ("SW-129", "a long-context policy is impossible"),
    ("SW-130", "hot_tokens or prefill_tokens of a long context is too small"),
    ("SW-131", "a long-context policy is not known"),
    ("SW-132", "a prompt does not begin with what is in its cache"),
    ("SW-133", "a cache of a long context can no longer be used"),
    ("SW-134", "tokens cannot be taken back out of a cache of a long context"),
    ("SW-135", "an exact policy cannot go on with a saved context of a sparse one"),
    ("SW-136", "the model, tokens, blocks or buffers of a library's call cannot be used"),
    ("SW-137", "a library's cache was closed, or belongs to another process"),
    ("SW-138", "a model to simulate cannot be used"),
    # 2xx CapacityError: a bound was reached
    ("SW-202", "the system refused memory for a slab"),
    ("SW-204", "too many sessions are connected"),
    ("SW-205", "a process of a sweep cannot be started, or was lost"),
    ("SW-206", "a driver does not give back a slab that was registered with it"),
    ("SW-207", "an engine does not unmap host memory that was taken from it (warning)"),
    ("SW-208", "a GPU's driver refused to register a slab"),
    ("SW-209", "the tiers of a long context, or the disk for a saved one, are full"),
    # 3xx IntegrityError: bytes are not what they should be
    ("SW-302", "a slot's generation changed while it was read"),
    ("SW-303", "the keyring is corrupt"),
    ("SW-304", "an invariant of the hierarchy does not hold"),
    ("SW-305", "a page of a long context failed its check"),
    ("SW-306", "a saved context, or the key file of saved contexts, is damaged"),
    # 4xx IdentityMismatch: this is not the same model, layout or session
    ("SW-401", "the ranks of a session describe different shapes"),
    ("SW-402", "the model has no weight files to identify it by (warning)"),
    ("SW-403", "the fingerprint of the weights could not be computed"),
    ("SW-404", "a member does not belong to the session that it names"),
    ("SW-405", "requests with an adapter bypass stepwell (warning)"),
    ("SW-406", "a namespace has blocks of other weights and is in quarantine (alarm)"),
    ("SW-407", "a saved context is of another model, or of another version of the format"),
    ("SW-408", "the engine's block hashes differ from start to start (warning)"),
    # 5xx BackendDown: the well or a tier does not serve
    ("SW-501", "a well is already running for this home"),
    ("SW-502", "the well did not start"),
    ("SW-503", "the well does not answer"),
    ("SW-504", "the connection to the well was lost"),
    ("SW-505", "no well is running for this home"),
    ("SW-506", "a directory of the disk tier is used by another well"),
    ("SW-507", "the disk tier has trouble (warning)"),
    ("SW-508", "the file of a long context cannot be read or written"),
    ("SW-509", "the process that scores near the data of a long context is gone"),
    ("SW-510", "the system refuses a process of an engine what it needs to reach the well"),
    ("SW-511", "the list of pauses cannot be read, so recalls and spills are paused (warning)"),
    ("SW-512", "a pause, or its end, is in force but was not kept for the well's next start"),
    ("SW-513", "the settings could not be read again in time, so nothing has changed"),
    ("SW-514", "the filesystem of home does not answer"),
    # 6xx AccessDenied: ownership and permissions
    ("SW-601", "home cannot be created, read or written"),
    ("SW-602", "home belongs to another user or can be written by others"),
    ("SW-603", "home lies on a network filesystem"),
    ("SW-604", "the runtime directory belongs to another user or is open to others"),
    ("SW-605", "the keyring cannot be read, belongs to another user or is open to others"),
    ("SW-606", "a process of another user was refused"),
    ("SW-607", "the keyring has no keys for the tenant"),
    ("SW-608", "a directory of the disk tier cannot be used, is not ours, or is open to others"),
    ("SW-609", "a directory of the disk tier lies on a network filesystem or in memory"),
    ("SW-610", "a saved context or its key cannot be opened, or the key does not belong to it"),
    # 7xx Unsupported: cannot be served correctly here, yet
    ("SW-701", "this platform is not Linux"),
    ("SW-702", "the system has no memfd_create"),
    ("SW-703", "the engine's device is not supported"),
    ("SW-704", "KV cache groups that cannot be served together"),
    ("SW-705", "the ranks of one engine run on different hosts"),
    ("SW-706", "the connector's kv_role is not kv_both"),
    ("SW-707", "the layout of the engine's KV cache is not known"),
    ("SW-708", "this kind of speculative decoding is not supported yet"),
    ("SW-710", "the engine lacks an interface that stepwell needs"),
    ("SW-711", "the keyring was written by another version of stepwell"),
    ("SW-712", "an option of the engine is not supported yet"),
    ("SW-714", "the GPU, or the CUDA of torch, cannot be used"),
    ("SW-715", "an attention implementation cannot be used across tiers"),
    ("SW-716", "a model cannot be used across tiers"),
    ("SW-717", "an option of generate cannot be used with a cache across tiers"),
    ("SW-718", "a connector made of several connectors is not supported yet"),
    # 8xx ProtocolError: messages between engine and well
    ("SW-801", "the engine side and the well speak different protocol versions"),
    ("SW-802", "a message is larger than the limit"),
    ("SW-803", "a message cannot be decoded"),
    ("SW-804", "a message is not allowed in this state"),
    ("SW-805", "a message came without the descriptor that belongs to it"),
)


class StepwellError(Exception):
    """Base of all errors that stepwell raises on purpose; raise one of its subclasses.

    `code` must be in `CODES` and in the hundreds of the class; anything else is a programming error and raises
    ValueError at construction. `what`, `why` and `fix` are plain sentences for the person who sees the message: no
    secrets, no prompt text, no tenant names.
    """

    family: ClassVar[str] = ""

    def __init__(self, code: str, *, what: str, why: str, fix: str) -> None:
        if not self.family:
            raise ValueError(f"{type(self).__name__} has no codes of its own; raise one of its subclasses")
        if code not in CODES or not code.startswith(f"SW-{self.family}"):
            raise ValueError(f"{code} is not a code of {type(self).__name__}")
        super().__init__(code, what, why, fix)
        self.code = code
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        """One line, whatever the parts contain: a log record or a terminal row must not be split by a file's name."""
        line = f"what: {self.what}  why: {self.why}  fix: {self.fix}  [{self.code}]"
        return " ".join(line.split())

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only parts do not survive the default; an error must be able to leave a worker process.
        return _rebuild, (type(self), self.code, self.what, self.why, self.fix)


class ConfigError(StepwellError, ValueError):
    """Something a person wrote cannot be used. Also a ValueError, so that pydantic reports it with its place."""

    family = "1"


class CapacityError(StepwellError):
    """A bound was reached; nothing was stored."""

    family = "2"


class IntegrityError(StepwellError):
    """Bytes failed their check and were not used."""

    family = "3"


class IdentityMismatch(StepwellError):
    """The parties do not mean the same model, layout or session."""

    family = "4"


class BackendDown(StepwellError):
    """The well or a tier does not serve; the caller goes on without it."""

    family = "5"


class AccessDenied(StepwellError):
    """Owner or permissions are not safe, or not sufficient."""

    family = "6"


class Unsupported(StepwellError):
    """Cannot be served correctly on this platform, engine or model."""

    family = "7"


class ProtocolError(StepwellError):
    """A message between engine and well is not acceptable; the connection ends."""

    family = "8"


def _rebuild(kind: type[StepwellError], code: str, what: str, why: str, fix: str) -> StepwellError:
    return kind(code, what=what, why=why, fix=fix)


_KINDS: dict[str, type[StepwellError]] = {
    kind.family: kind
    for kind in (
        ConfigError,
        CapacityError,
        IntegrityError,
        IdentityMismatch,
        BackendDown,
        AccessDenied,
        Unsupported,
        ProtocolError,
    )
}


def as_error(code: str, what: str, why: str, fix: str) -> StepwellError:
    """An error that came over the socket, as the error it was. A code that this version does not know keeps its texts
    under SW-801: the other side is newer."""
    if code in CODES:
        return _rebuild(_KINDS[code[3]], code, what, why, fix)
    return ProtocolError("SW-801", what=f"{what} ({code})", why=why, fix=fix)
