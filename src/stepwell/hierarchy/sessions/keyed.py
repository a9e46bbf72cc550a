"""A session's namespace as its tenant's keys name it: one origin for each key epoch, at each epoch of its weights."""

from __future__ import annotations

from collections.abc import Collection

from stepwell.block.namespace import Namespace
from stepwell.hierarchy.arena.origin import Origin
from stepwell.hierarchy.sessions.sealing import Sealing

EPOCHS_KEPT = 4
"""Weights epochs whose origins are kept at hand."""


class KeyedNamespace:
    """`namespace` is that of the weights as loaded."""

    def __init__(self, sealing: Sealing, tenant: str, namespace: Namespace) -> None:
        self._sealing = sealing
        self._tenant = tenant
        self.namespace = namespace
        self._known: dict[int, tuple[Origin, ...]] = {}

    def at(self, epoch: int) -> tuple[Origin, ...]:
        """The origins at this weights epoch, the newest key's first. Raises AccessDenied SW-607 where the tenant has no
        keys."""
        origins = self._known.get(epoch)
        if origins is None:
            origins = self._sealing.origins(self._tenant, self.namespace.at_epoch(epoch % (1 << 64)))
            self._known[epoch] = origins
            while len(self._known) > EPOCHS_KEPT:
                del self._known[next(iter(self._known))]
        return origins

    @property
    def known(self) -> Collection[tuple[Origin, ...]]:
        """The origins of the epochs that were asked for last."""
        return self._known.values()
