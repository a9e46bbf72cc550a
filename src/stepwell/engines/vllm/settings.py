"""The connector's extra config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepwell.engines.common.canaries import EVERY
from stepwell.errors import ConfigError
from stepwell.io.paths import Rendezvous, home_dir

MIN_WINDOW = 256 << 20
"""Bytes that the arena of a well has at least which a tier below vLLM's offloading starts, if its user says nothing."""


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """home: the well's home directory. socket: where a well listens that its operator runs: it is joined there and
    never started, and home then only keeps the fingerprints of weights. strict: refuse to start the engine where
    stepwell cannot serve it. block_tokens: tokens a block, a multiple of the engine's page (None: decided by size).
    weights_id: names the weights instead of their fingerprint. canary: of so many prefixes that could be recalled, one
    is left to be recomputed and compared (0: none). receipts: responses say what was recalled for them. options:
    settings for a well that may have to be started; checked by the well."""

    home: Path
    socket: Path | None = None
    strict: bool = False
    block_tokens: int | None = None
    weights_id: str | None = None
    canary: int = EVERY
    receipts: bool = False
    options: dict[str, str | int | float] = field(default_factory=dict)


def parse(extra: Mapping[str, Any], page: int, where: str = "kv_connector_extra_config") -> ConnectorSettings:
    """The settings that stand at `where` in vLLM's configuration. `page`: tokens of an engine page. Keys that are not
    the connector's own are passed to the well, which checks them. Raises ConfigError."""
    rest = dict(extra)
    home = rest.pop("home", None)
    socket = rest.pop("socket", None) or os.environ.get("STEPWELL_SOCKET") or None
    strict = rest.pop("strict", False)
    block_tokens = rest.pop("block_tokens", None)
    weights_id = rest.pop("weights_id", None)
    canary = rest.pop("canary", EVERY)
    receipts = rest.pop("receipts", False)
    if home is not None and not isinstance(home, str):
        raise _bad(where, "home", home, "a path")
    if socket is not None and not (isinstance(socket, str) and os.path.isabs(socket)):
        raise _bad(where, "socket", socket, "the absolute path of the well's socket")
    if weights_id is not None and not (isinstance(weights_id, str) and weights_id):
        raise _bad(where, "weights_id", weights_id, "a text that names exactly these weights")
    for key, value in (("strict", strict), ("receipts", receipts)):
        if not isinstance(value, bool):
            raise _bad(where, key, value, "true or false")
    whole = isinstance(block_tokens, int) and not isinstance(block_tokens, bool)
    if block_tokens is not None and not (whole and block_tokens > 0 and block_tokens % page == 0):
        raise _bad(where, "block_tokens", block_tokens, f"a multiple of the engine's page of {page} tokens")
    if not isinstance(canary, int) or isinstance(canary, bool) or canary < 0:
        expected = "a whole number: one recalled prefix in so many is computed instead, 0 for none"
        raise _bad(where, "canary", canary, expected)
    for key, value in rest.items():
        if not isinstance(value, str | int | float):
            raise _bad(where, key, value, "a plain value")
    place = Path(home) if home else home_dir(os.environ)
    at = Rendezvous.named(Path(socket)).socket if socket else None
    return ConnectorSettings(place, at, strict, block_tokens, weights_id, canary, receipts, rest)


def _bad(where: str, key: str, value: object, expected: str) -> ConfigError:
    return ConfigError(
        "SW-102",
        what=f"{where}: {key} = {value!r}",
        why=f"it must be {expected}",
        fix=f"correct or remove {key}",
    )
