"""The interface of a device for `GpuCopies`: `CudaDevice` implements it, and a late one for tests."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from stepwell.engines.paged.base import Mark
from stepwell.engines.paged.pool import Pool
from stepwell.engines.paged.runs import Places
from stepwell.io.memory import Bytes


class Direction(Enum):
    """Each direction has a queue of its own: both may run at once, and copies of one direction keep their order."""

    OUT = "gather"
    IN = "scatter"


class CopyMethod(Enum):
    """ENGINE: a copy engine, by evenly spaced runs. KERNEL: some of the GPU's processors read or write host memory."""

    ENGINE = "engine"
    KERNEL = "kernel"


class DeviceEvent(Protocol):
    """A point in a queue of the device."""

    @property
    def passed(self) -> bool:
        """Everything before it in its queue has ended, or the device has failed, so that nothing runs any more."""

    def wait(self) -> None:
        """Returns when it has passed; does not hold the GIL. Raises RuntimeError when the device has failed."""


class Device(Protocol):
    """Queues: the engine's (`now`, `hold_back`) and one for each direction. What one of them is handed begins when all
    before it in that queue has ended. Raises RuntimeError when the device refuses."""

    kernel_reaches: bool
    """A kernel finds memory that was registered at the address that it has here."""

    def now(self) -> Mark:
        """The end of the engine's queue. It is a DeviceEvent too."""

    def enqueue(
        self, direction: Direction, method: CopyMethod, where: Places, pool: Pool, after: Sequence[Mark | DeviceEvent]
    ) -> tuple[DeviceEvent, DeviceEvent]:
        """Copies between these places and their pages, once all of `after` has passed; (began, ended). Raises only
        where nothing was begun or all of it has ended."""

    def seconds(self, began: DeviceEvent, ended: DeviceEvent) -> float:
        """Time between two events that have passed."""

    def hold_back(self, event: DeviceEvent) -> None:
        """The engine's queue goes on from here when the event has passed."""

    def memory(self, nbytes: int) -> Bytes:
        """Host memory that the device can reach, for as long as it is referenced."""

    def register(self, memory: Bytes) -> None:
        """Makes host memory reachable. Blocks. Raises CapacityError SW-208."""

    def unregister(self, memory: Bytes) -> None:
        """Undoes `register`. Raises RuntimeError."""

    def close(self) -> None:
        """Called last."""
