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
    """The files to fingerprint, sorted, at least one of them with weights. `drafter`: the same, of a drafter that has
    files of its own; empty: there is none."""

    paths: tuple[Path, ...]
    drafter: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class NoWeightFiles:
    """The weights cannot be identified by files; `reason` completes "no weight files: ..."."""

    reason: str


def together(model: bytes, drafter: bytes = b"") -> bytes:
    """The digest of a model's weights, and of a drafter's if it has its own. Which is which counts: two checkpoints may
    serve either way."""
    return digest_of({"model": model.hex(), "drafter": drafter.hex()}) if drafter else model


class WeightsIdentity:
    """Digest of the weights, once it is known. `name`, if given, stands for them; otherwise the files that `find` names
    are read by another process, and what was read before is kept in `cache`. Without files the digest is one that no
    other start has. Never blocks once it is made."""

    def __init__(self, name: str | None, find: Callable[[], WeightFiles | NoWeightFiles], cache: Path) -> None:
        self._digest: bytes | None = None
        self._failed = False
        self._fingerprints: list[Fingerprint] = []
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
        if kind := next(filter(None, (unstamped(path, table) for path in (*files.paths, *files.drafter))), ""):
            log.info(
                "stepwell: the weights are read at every start: times prove nothing on their filesystem (%s)", kind
            )
        self._fingerprints = [Fingerprint.start(paths, cache) for paths in (files.paths, files.drafter) if paths]

    def __call__(self) -> bytes | None:
        """The digest; None while it is not known."""
        if self._digest is None and self._fingerprints and not self._failed:
            results = [fingerprint.result() for fingerprint in self._fingerprints]
            known = [result.digest for result in results if isinstance(result, Known)]
            if failed := next((result for result in results if isinstance(result, Failed)), None):
                self._failed = True
                log_messages.trouble(
                    IdentityMismatch(
                        "SW-403",
                        what="the weights could not be read",
                        why=failed.reason,
                        fix="make the weight files readable; until then nothing is recalled",
                    )
                )
            elif len(known) == len(results):
                self._digest = together(*known)
        return self._digest

    def close(self) -> None:
        for fingerprint in self._fingerprints:
            fingerprint.close()
