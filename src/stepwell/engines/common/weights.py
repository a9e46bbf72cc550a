"""Identity of an engine's weights: a name that its user gave, or the fingerprint of their files."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stepwell.block.facts import digest_of
from stepwell.client.fingerprint import Failed, Fingerprint, Known
from stepwell.engines.common import log_messages
from stepwell.errors import IdentityMismatch
from stepwell.io.mounts import mounts, unstamped

log = logging.getLogger("stepwell")


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files to fingerprint, sorted, at least one of them with weights."""

    paths: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class NoWeightFiles:
    """The weights cannot be identified by files; `reason` completes "no weight files: ..."."""

    reason: str


class WeightsIdentity:
    """Digest of the weights, once it is known. `name`, if given, stands for them; otherwise the files that `find` names
    are read by another process, and what was read before is kept in `cache`. Without files the digest is one that no
    other start has. Never blocks once it is made."""

    def __init__(self, name: str | None, find: Callable[[], WeightFiles | NoWeightFiles], cache: Path) -> None:
        self._digest: bytes | None = None
        self._failed = False
        self._fingerprint: Fingerprint | None = None
        if name is not None:
            self._digest = digest_of({"weights_id": name})
            return
        files = find()
        if isinstance(files, NoWeightFiles):
            self._digest = secrets.token_bytes(32)
            log_messages.trouble(
                IdentityMismatch(
                    "SW-402",
                    what="the weights of this engine cannot be identified",
                    why=f"no weight files: {files.reason}",
                    fix="set weights_id in the engine's settings of stepwell to share blocks across starts",
                )
            )
            return
        table = mounts()
        if kind := next(filter(None, (unstamped(path, table) for path in files.paths)), ""):
            log.info(
                "stepwell: the weights are read at every start: times prove nothing on their filesystem (%s)", kind
            )
        self._fingerprint = Fingerprint.start(files.paths, cache)

    def __call__(self) -> bytes | None:
        """The digest; None while it is not known."""
        if self._digest is None and self._fingerprint is not None and not self._failed:
            match self._fingerprint.result():
                case Known(digest):
                    self._digest = digest
                case Failed(reason):
                    self._failed = True
                    log_messages.trouble(
                        IdentityMismatch(
                            "SW-403",
                            what="the weights could not be read",
                            why=reason,
                            fix="make the weight files readable; until then nothing is recalled",
                        )
                    )
        return self._digest

    def close(self) -> None:
        if self._fingerprint is not None:
            self._fingerprint.close()
