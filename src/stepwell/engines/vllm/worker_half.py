"""The half of the connector that lives in each worker: executes the scheduler's plans and reports.

Loads start after the forward (their pages are not part of it), saves read pages that earlier steps completed. Up to a
bound, loads are copied inline and reported in the same step; larger ones go to a thread beside the next forward.
Every load is reported as received exactly once and every release is reported, whatever happens to copies and well: a
request whose pages are never given back would wait for ever.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue

from stepwell.client.worker import Hold, WorkerClient
from stepwell.engines.vllm.copies import CpuCopies, Shard
from stepwell.engines.vllm.plan import Compare, Load, Save, StepPlan, StepReport
from stepwell.errors import StepwellError

log = logging.getLogger("stepwell")

INLINE_BYTES = 128 << 20
"""Bytes of loads that a step copies before it goes on: some 10 to 25 ms. A copy beside the forward would take the
forward's time where cores are few, and the request that waits for it would wait longer."""


class WorkerHalf:
    """`shard`: which part of a block this rank holds (its own number, if not said). `writes`: of the ranks that hold
    it, this is the one that saves it."""

    def __init__(
        self,
        rank: int,
        shard_bytes: int,
        copies: CpuCopies,
        client: WorkerClient,
        *,
        shard: int | None = None,
        writes: bool = True,
    ) -> None:
        self._rank = rank
        self._shard = rank if shard is None else shard
        self._writes = writes
        self._shard_bytes = shard_bytes
        self._copies = copies
        self._client = client
        self._lock = threading.Lock()  # guards what the copying thread reports into
        self._report = StepReport()
        self._received: set[str] = set()
        self._bad_pages: set[int] = set()
        self._sent: set[str] = set()
        self._began = 0.0  # when the forward under way did; 0: none is
        self._large: SimpleQueue[Load | None] = SimpleQueue()
        threading.Thread(target=self._copy_large, name="stepwell-copy", daemon=True).start()

    # hooks, in the order of a step ------------------------------------------------------------------------------------

    def before_forward(self, plan: StepPlan) -> None:
        """Last moment of pages that were taken back from a request."""
        urgent, plan.urgent = plan.urgent, []
        self._save(urgent)
        self._began = time.monotonic()

    def start_loads(self, plan: StepPlan) -> None:
        """Comes right after the forward, since no load is a synchronous one. On a CPU the forward has ended then."""
        if self._began:
            with self._lock:
                self._report.seconds[plan.step] = time.monotonic() - self._began
            self._began = 0.0
        room = INLINE_BYTES
        for load in plan.loads:
            room -= len(load.blocks) * self._shard_bytes
            if room >= 0:
                self._load(load)
            else:
                self._large.put(load)

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
            self._save(plan.saves)
        for compare in plan.compares:
            self._compare(compare)

    def take_finished(self) -> tuple[set[str] | None, set[str] | None]:
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
        return report

    # copying ----------------------------------------------------------------------------------------------------------

    def _save(self, saves: Sequence[Save]) -> None:
        if not saves or not self._writes:
            return
        failed: list[Save] = []
        filled: list[Save] = []
        shards: list[Shard] = []
        with self._client.copying() as hold:
            for save in saves:
                try:
                    shards.append(Shard(hold.slot(save.session, *save.refs[self._shard]), 0, save.pages))
                    filled.append(save)
                except Exception as error:  # noqa: BLE001 - a lease that nobody answers for would stay until the session ends
                    log.debug("a block was not spilled: %s", error)
                    failed.append(save)
            try:
                self._copies.gather(shards)
            except Exception as error:  # noqa: BLE001 - a failed spill is a few blocks less, never an engine less
                log.debug("blocks were not spilled: %s", error)
                failed, filled = list(saves), []
            finally:
                shards.clear()  # views of slots: none may outlive `copying`
        for session, leases in _by_session(filled).items():
            self._client.filled(session, leases, [])
        with self._lock:
            self._report.spilled_bytes += len(filled) * self._shard_bytes
        self._drop(failed)

    def _drop(self, saves: Sequence[Save]) -> None:
        for session, leases in _by_session(saves if self._writes else ()).items():
            self._client.filled(session, [], leases)

    def _load(self, load: Load) -> None:
        """Copies, and reports. Raises nothing: a load that nobody reports would leave its request waiting for ever."""
        good, began = 0, time.monotonic()
        try:
            with self._client.copying() as hold:
                good = self._copy_in(load, hold)
        except Exception as error:  # noqa: BLE001 - a failed load is recomputed
            log.debug("blocks were not recalled: %s", error)
        with self._lock:
            self._report.recalled_bytes += sum(len(pages) for _, pages in load.blocks[:good]) * self._copies.page_bytes
            if good < len(load.blocks):
                self._report.failed.append((load.request, load.transfer, good))
                for _, pages in load.blocks[good:]:
                    self._bad_pages.update(pages)
            else:
                self._report.loaded.append((load.request, load.transfer, time.monotonic() - began))
            self._received.add(load.request)
        try:
            self._client.recalled(load.session, [load.transfer])
        except Exception as error:  # noqa: BLE001 - its lease ends with the session
            log.debug("a recall was not acknowledged: %s", error)

    def _copy_in(self, load: Load, hold: Hold) -> int:
        """How many leading blocks are in their pages, as the well has leased them. A slot is checked before it is read,
        and again afterwards."""
        shards: list[Shard] = []
        skip = load.skip
        try:
            for refs, pages in load.blocks:
                shards.append(Shard(hold.slot(load.session, *refs[self._shard]), skip, pages))
                skip = 0
        except StepwellError as error:
            log.debug("a block was not recalled: %s", error)
        self._copies.scatter(shards)
        for good, (refs, _) in enumerate(load.blocks[: len(shards)]):
            try:
                self._client.verify(load.session, *refs[self._shard])
            except StepwellError as error:
                log.debug("a block was not recalled: %s", error)
                return good
        return len(shards)

    def _compare(self, compare: Compare) -> None:
        """A canary. Reports in any case, and raises nothing: a lease that nobody ends would stay until the session
        does."""
        errors: list[float] = []
        if compare.blocks:
            try:
                with self._client.copying() as hold:
                    errors = self._errors(compare, hold)
            except Exception as error:  # noqa: BLE001 - one canary less
                log.debug("a canary was not compared: %s", error)
        with self._lock:
            self._report.compared.append((self._rank, compare.transfer, errors))
        self._client.recalled(compare.session, [compare.transfer])

    def _errors(self, compare: Compare, hold: Hold) -> list[float]:
        """The worst of each layer over the blocks, which are checked to be those leased before they are read and
        afterwards. Raises IntegrityError."""
        worst: list[float] = []
        for refs, pages in compare.blocks:
            ref = refs[self._shard]
            errors = self._copies.errors(Shard(hold.slot(compare.session, *ref), 0, pages))
            self._client.verify(compare.session, *ref)
            worst = [max(pair) for pair in zip(worst, errors, strict=True)] if worst else errors
        return worst

    def _copy_large(self) -> None:
        while (load := self._large.get()) is not None:
            self._load(load)

    def close(self) -> None:
        """Ends the copying threads when they have done what they were given. Does not wait."""
        self._large.put(None)
        self._copies.close()


def _by_session(saves: Sequence[Save]) -> dict[int, list[int]]:
    leases: dict[int, list[int]] = {}
    for save in saves:
        leases.setdefault(save.session, []).append(save.lease)
    return leases
