"""How recalls get into pages: the blocks of a load all at once, those of a stream as they land.

    known where they lie:   hold -> copy in parts -> check slots again -> acknowledged
    a stream:               | blocks land -> hold -> copy -> check slots again -> said to be copied | ... acknowledged

A stream ends when all of its blocks have come, at one that is not what was leased, when the well or its limits say that
no more come, and when nobody waits for it any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence

from stepwell.client.streams import Stream
from stepwell.client.worker import Hold, WorkerClient
from stepwell.engines.common.plan import LoadBlock
from stepwell.engines.common.tasks import LoadTask
from stepwell.engines.paged.base import Copies, Copying, Mark, Shard
from stepwell.engines.paged.lane import Steps
from stepwell.errors import StepwellError

log = logging.getLogger("stepwell")

PART_BYTES = 32 << 20
"""A load that runs beside the forward is handed over in parts, two at a time: so bounded is what others wait for. Of a
stream no more is copied before others have their turn."""


class Loads:
    """`awake` returns the copies, or raises RuntimeError where pages have no memory. `shard`: number of the part of a
    block that this rank holds. `answer` acknowledges a task."""

    def __init__(
        self,
        client: WorkerClient,
        awake: Callable[[], Copies],
        shard: int,
        shard_bytes: int,
        answer: Callable[[LoadTask], None],
    ) -> None:
        self._client = client
        self._awake = awake
        self._shard = shard
        self._part = max(1, PART_BYTES // shard_bytes)
        self._answer = answer

    def load(self, task: LoadTask, after: Mark) -> Steps:
        """The steps of a load whose refs are known."""
        try:
            yield from self._copy(task, task.load.blocks, after)
        except Exception as error:  # noqa: BLE001 - a failed load is recomputed
            log.debug("blocks were not recalled: %s", error)
        self._answer(task)

    def stream(self, task: LoadTask, after: Mark) -> Steps:
        """The steps of a stream."""
        load = task.load
        assert load.limits is not None
        try:
            with self._client.stream(load.session, load.transfer, load.limits) as stream:
                task.late = yield from self._follow(task, stream, after)
        except Exception as error:  # noqa: BLE001 - the same
            log.debug("blocks were not recalled: %s", error)
        if self._asleep:
            task.good, task.late = 0, "gave_way"  # pages hold nothing any more
        self._answer(task)

    @property
    def _asleep(self) -> bool:
        try:
            self._awake()
        except RuntimeError:
            return True
        return False

    def _follow(self, task: LoadTask, stream: Stream, after: Mark) -> Generator[Copying | None, None, str]:
        """Why not all blocks have come; "" if they have, or one has failed."""
        load = task.load
        while task.good < len(load.blocks):
            if task.unwanted or self._asleep:
                return "gave_way"
            over = stream.over  # before it is asked for the last ones
            landed = stream.next(0.0)
            if landed is None:
                if over:
                    return over
                yield None
                continue
            rows = landed.tolist()
            for at in range(0, len(rows), self._part):
                first = task.good
                refs = rows[at : at + self._part]
                landed_blocks = [(row, *block[1:]) for row, block in zip(refs, load.blocks[first:], strict=False)]
                yield from self._copy(task, landed_blocks, after)
                if task.good < first + len(landed_blocks):
                    return ""
                self._client.copied(load.session, load.transfer, task.good)
        return ""

    def _copy(self, task: LoadTask, blocks: Sequence[LoadBlock], after: Mark) -> Generator[Copying, None, None]:
        """Copies the next blocks of the task, and counts how many of them are in their pages, as the well has leased
        them."""
        with task.holding(self._client) as hold:
            yield from self._copy_in(task, hold, blocks, after)

    def _copy_in(
        self, task: LoadTask, hold: Hold, blocks: Sequence[LoadBlock], after: Mark
    ) -> Generator[Copying, None, None]:
        """A slot is checked before it is read, and again afterwards."""
        session = task.load.session
        shards: list[Shard] = []
        try:
            for refs, skip, pages in blocks:
                shards.append(Shard(hold.slot(session, *refs[self._shard]), skip, pages))
        except StepwellError as error:
            log.debug("a block was not recalled: %s", error)
        yield from self._scatter(task, shards, after)
        for refs, *_ in blocks[: len(shards)]:
            try:
                self._client.verify(session, *refs[self._shard])
            except StepwellError as error:
                log.debug("a block was not recalled: %s", error)
                return
            task.good += 1

    def _scatter(self, task: LoadTask, shards: list[Shard], after: Mark) -> Generator[Copying, None, None]:
        task.begun = []  # those of before have ended
        waited = 0
        for part in self._parts(shards):
            task.begun.append(self._awake().scatter(part, after))
            if len(task.begun) - waited == 2:
                yield task.begun[waited]
                task.seconds += task.begun[waited].seconds
                waited += 1
        for copying in task.begun[waited:]:
            yield copying
            task.seconds += copying.seconds

    def _parts(self, shards: Sequence[Shard]) -> Iterator[Sequence[Shard]]:
        """The shards of each scatter: all of them where a copy is over when it returns."""
        each = self._part if self._awake().overlaps else len(shards) or 1
        for first in range(0, len(shards), each):
            yield shards[first : first + each]
