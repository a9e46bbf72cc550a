"""The half of the connector that lives in each worker: executes the scheduler's plans and reports.

Loads start after the forward (their pages are not part of it), saves read pages that earlier steps completed. On CPU
the step itself copies, but for large loads; on a GPU copies run beside the forward that follows, which is held back
where it writes pages that are still being read (`StepPlan.fresh`). Every load is reported as received exactly once and
every release is reported, whatever happens to copies and well: a request whose pages are never given back would wait
for ever.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence

from stepwell.client.worker import Hold, WorkerClient
from stepwell.engines.paged.base import Copies, Copying, Mark, Shard
from stepwell.engines.paged.lane import Job, Lane, advance, finish
from stepwell.engines.vllm.plan import Compare, Load, Ref, Save, StepPlan, StepReport
from stepwell.engines.vllm.steps import MOST_STEPS
from stepwell.errors import StepwellError
from stepwell.io.memory import Bytes

log = logging.getLogger("stepwell")

PART_BYTES = 32 << 20
"""A load that runs beside the forward is handed over in parts, two at a time: so bounded is what others wait for."""


class WorkerHalf:
    """`shard`: which part of a block this rank holds (its own number, if not said). `writes`: of the ranks that hold
    it, this is the one that saves it. `threaded`: copies that run are waited for by threads; else whenever something is
    taken from here."""

    def __init__(
        self,
        rank: int,
        shard_bytes: int,
        copies: Copies,
        client: WorkerClient,
        *,
        shard: int | None = None,
        writes: bool = True,
        threaded: bool = True,
    ) -> None:
        self._rank = rank
        self._shard = rank if shard is None else shard
        self._writes = writes
        self._shard_bytes = shard_bytes
        self._copies = copies
        self._client = client
        self._lock = threading.Lock()  # guards what the lanes report into
        self._report = StepReport()
        self._received: set[str] = set()
        self._bad_pages: set[int] = set()
        self._sent: set[str] = set()
        self._before: Mark | None = None  # of the forward under way; None: none is
        self._last: Mark = copies.now()  # of the forward that began last
        self._forwards: deque[tuple[int, Mark, Mark]] = deque(maxlen=MOST_STEPS)  # not known yet how long they took
        threaded_out = threaded and copies.overlaps
        self._out = Lane("stepwell-copy-out", threaded=threaded_out)  # has work only where copies overlap
        self._in = Lane("stepwell-copy", threaded=threaded)

    # hooks, in the order of a step ------------------------------------------------------------------------------------

    def before_forward(self, plan: StepPlan) -> None:
        """Last moment of pages that were taken back from a request."""
        self._last = self._before = self._copies.now()
        urgent, plan.urgent = plan.urgent, []
        self._save(urgent, self._before)
        self._copies.hold_back(plan.fresh)

    def start_loads(self, plan: StepPlan) -> None:
        """Comes right after the forward, since no load is a synchronous one. On a CPU the forward has ended then; on a
        GPU it has been handed over, and so has what may have been written to the loads' pages before."""
        after = self._copies.now()
        if self._before is not None:
            self._forwards.append((plan.step, self._before, after))
            self._before = None
        room = self._copies.inline_bytes
        for load in plan.loads:
            room -= len(load.blocks) * self._shard_bytes
            if room >= 0:
                finish(self._load(load, after))
            else:
                self._in.put(self._load(load, after))

    def end_of_step(self, plan: StepPlan) -> None:
        """Called from a `finally` too: a forward that raised has left half-written pages."""
        raised = sys.exc_info()[0] is not None
        with self._lock:
            self._sent.update(plan.release)
            if not raised:
                self._report.done[plan.step] = 1
        late, plan.urgent = plan.urgent, []  # were not asked for in time: their pages are written anew by now
        self._drop([*late, *plan.saves] if raised else late)
        if not raised:
            self._save(plan.saves, self._last)
        for compare in plan.compares:
            self._begin(self._compare(compare, self._last))

    def take_finished(self) -> tuple[set[str] | None, set[str] | None]:
        self._poll()
        with self._lock:
            sent, self._sent = self._sent, set()
            received, self._received = self._received, set()
        return sent or None, received or None

    def take_bad_pages(self) -> set[int]:
        with self._lock:
            bad, self._bad_pages = self._bad_pages, set()
        return bad

    def take_report(self) -> StepReport:
        with self._lock:
            report, self._report = self._report, StepReport()
        for _ in range(len(self._forwards)):
            step, before, after = self._forwards.popleft()
            if (seconds := after.seconds_after(before)) is None:
                self._forwards.append((step, before, after))
            else:
                report.seconds[step] = seconds
        return report

    # copying ----------------------------------------------------------------------------------------------------------

    def _begin(self, job: Job) -> None:
        """Does what can be done now; the rest when its copies are done."""
        if (copying := advance(job)) is not None:
            self._out.put(job, copying)

    def _poll(self) -> None:
        self._out.poll()
        self._in.poll()

    def _save(self, saves: Sequence[Save], after: Mark) -> None:
        if saves and self._writes:
            self._begin(self._spill(saves, after))

    def _spill(self, saves: Sequence[Save], after: Mark) -> Job:
        failed: list[Save] = []
        filled: list[Save] = []
        try:
            with self._client.copying() as hold:
                shards: list[Shard] = []
                for save in saves:
                    try:
                        shards.append(Shard(hold.slot(save.session, *self._ref(save.refs)), 0, save.pages))
                        filled.append(save)
                    except Exception as error:  # noqa: BLE001 - a lease that nobody answers for would stay for long
                        log.debug("a block was not spilled: %s", error)
                        failed.append(save)
                try:
                    yield self._copies.gather(shards, after)
                finally:
                    shards.clear()  # views of slots: none may outlive the hold
        except Exception as error:  # noqa: BLE001 - a failed spill is a few blocks less, never an engine less
            log.debug("blocks were not spilled: %s", error)
            failed, filled = list(saves), []
        for session, leases in _by_session(filled).items():
            self._client.filled(session, leases, [])
        with self._lock:
            self._report.spilled_bytes += len(filled) * self._shard_bytes
        self._drop(failed)

    def _drop(self, saves: Sequence[Save]) -> None:
        for session, leases in _by_session(saves if self._writes else ()).items():
            self._client.filled(session, [], leases)

    def _load(self, load: Load, after: Mark) -> Job:
        """Copies, and reports. Raises nothing: a load that nobody reports would leave its request waiting for ever."""
        good, seconds = 0, 0.0
        try:
            with self._client.copying() as hold:
                good, seconds = yield from self._copy_in(load, hold, after)
        except Exception as error:  # noqa: BLE001 - a failed load is recomputed
            log.debug("blocks were not recalled: %s", error)
        with self._lock:
            self._report.recalled_bytes += sum(len(pages) for _, pages in load.blocks[:good]) * self._copies.page_bytes
            if good < len(load.blocks):
                self._report.failed.append((load.request, load.transfer, good))
                for _, pages in load.blocks[good:]:
                    self._bad_pages.update(pages)
            else:
                self._report.loaded.append((load.request, load.transfer, seconds))
            self._received.add(load.request)
        try:
            self._client.recalled(load.session, [load.transfer])
        except Exception as error:  # noqa: BLE001 - its lease ends with the session
            log.debug("a recall was not acknowledged: %s", error)

    def _copy_in(self, load: Load, hold: Hold, after: Mark) -> Generator[Copying, None, tuple[int, float]]:
        """How many leading blocks are in their pages, as the well has leased them, and seconds of copying. A slot is
        checked before it is read, and again afterwards."""
        shards: list[Shard] = []
        skip = load.skip
        try:
            for refs, pages in load.blocks:
                shards.append(Shard(hold.slot(load.session, *self._ref(refs)), skip, pages))
                skip = 0
        except StepwellError as error:
            log.debug("a block was not recalled: %s", error)
        seconds = yield from self._scatter(shards, after)
        for good, (refs, _) in enumerate(load.blocks[: len(shards)]):
            try:
                self._client.verify(load.session, *self._ref(refs))
            except StepwellError as error:
                log.debug("a block was not recalled: %s", error)
                return good, seconds
        return len(shards), seconds

    def _scatter(self, shards: Sequence[Shard], after: Mark) -> Generator[Copying, None, float]:
        """Seconds of copying. Nobody copies any more when it returns, and when it raises."""
        running: deque[Copying] = deque()
        seconds = 0.0
        try:
            for part in self._parts(shards):
                running.append(self._copies.scatter(part, after))
                if len(running) == 2:
                    yield running[0]
                    seconds += running.popleft().seconds
            while running:
                yield running[0]
                seconds += running.popleft().seconds
        except Exception:
            while running:
                try:
                    yield running[0]
                except Exception as error:  # noqa: BLE001 - the first one is raised
                    log.debug("blocks were not recalled: %s", error)
                running.popleft()
            raise
        return seconds

    def _parts(self, shards: Sequence[Shard]) -> Iterator[Sequence[Shard]]:
        """All at once where a copy is over when it returns."""
        each = max(1, PART_BYTES // self._shard_bytes) if self._copies.overlaps else len(shards) or 1
        for first in range(0, len(shards), each):
            yield shards[first : first + each]

    def _compare(self, compare: Compare, after: Mark) -> Job:
        """A canary. Reports in any case, and raises nothing: a lease that nobody ends would stay until the session
        does."""
        errors: list[float] = []
        try:
            with self._client.copying() as hold:
                # All at once: its pages may be written anew by the next step, which waits for what is under way only.
                fetched = [self._copies.fetch(pages, after) for _, pages in compare.blocks]
                for (refs, _), (copying, fresh) in zip(compare.blocks, fetched, strict=True):
                    yield copying
                    more = self._errors(compare.session, self._ref(refs), fresh, hold)
                    errors = [max(pair) for pair in zip(errors, more, strict=True)] if errors else more
        except Exception as error:  # noqa: BLE001 - one canary less
            log.debug("a canary was not compared: %s", error)
            errors = []
        with self._lock:
            self._report.compared.append((self._rank, compare.transfer, errors))
        self._client.recalled(compare.session, [compare.transfer])

    def _errors(self, session: int, ref: Ref, fresh: Bytes, hold: Hold) -> list[float]:
        """Each layer's, of one block, which is checked to be the one leased before it is read and afterwards. Raises
        IntegrityError."""
        slot = hold.slot(session, *ref)
        errors = self._copies.errors(fresh, slot.bytes.reshape(-1, self._copies.page_bytes)[: len(fresh)])
        self._client.verify(session, *ref)
        return errors

    def _ref(self, refs: Sequence[Ref]) -> Ref:
        return refs[self._shard]

    def close(self) -> None:
        """Ends the copying threads when they have done what they were given. Does not wait."""
        self._out.close()
        self._in.close()
        self._copies.close()


def _by_session(saves: Sequence[Save]) -> dict[int, list[int]]:
    leases: dict[int, list[int]] = {}
    for save in saves:
        leases.setdefault(save.session, []).append(save.lease)
    return leases
