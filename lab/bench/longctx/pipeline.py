"""How much of the time that fetching takes the model does not notice, on modelled links.

The balance point is where fetching for a token takes as long as its mathematics. Bytes and seconds of computation come
from a run without a limit; what fetching takes beside the link (reading, decoding, latency, threads that share cores)
comes from a run at the bandwidth that these two give, and is taken off. At the bandwidth that follows and at four
others the same steps are run with real threads and sleeps; the ledger tells what was fetched in how many seconds, and
for how many of these the model waited. The run without a limit is also replayed on a virtual clock (`virtual`), which
no other work on the machine disturbs, and where only the link takes time. Every figure of a link is modelled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lab.bench.longctx import setup
from lab.bench.longctx.setup import left_out, one
from lab.bench.longctx.stage import SKIPPED, Stage
from lab.bench.longctx.virtual import recording, replay
from lab.bench.report import Result, Row, Target
from stepwell.demo.results import stats
from stepwell.longctx import Attached, TieredCache, attach
from stepwell.longctx.store.link import LinkQueue, ModelledLink

HIDDEN = Target(">=", 0.8)
FACTORS = (1.0, 0.5, 2.0, 0.25, 4.0)
"""Of the bandwidth at balance; the one that is judged comes first."""
POLICIES = ("stepwell", "exact")
UNLIMITED = ModelledLink(1e15)
LATENCY = 50e-6
BALANCED = 0.9
"""Where fetching takes less than so much of what computing takes, hiding it is easier than at balance."""
CONTEXT, HOT, STEPS = 2048, 512, 24


@dataclass(frozen=True, slots=True)
class Steps:
    """Of some decode steps: seconds of each, bytes that came up, seconds of fetching and of waiting for it."""

    seconds: list[float]
    nbytes: int
    fetch: float
    stall: float
    stalls: list[float]
    fetches: list[float]

    @property
    def hidden(self) -> float:
        return hidden(self.fetch, self.stall)

    @property
    def computing(self) -> float:
        """Seconds per token that are not spent waiting."""
        return (sum(self.seconds) - self.stall) / len(self.seconds)

    @property
    def per_token(self) -> float:
        return self.nbytes / len(self.seconds)


def hidden(fetch: float, stall: float) -> float:
    """The share of the fetching time that nobody waited for; 1 if nothing was fetched."""
    return 1.0 - min(1.0, stall / fetch) if fetch > 0 else 1.0


def balance(per_token: float, computing: float) -> float:
    """The bandwidth, bytes/s, at which a token's bytes take as long as its mathematics."""
    return per_token / computing


def balanced(tried: Steps, bandwidth: float, computing: float) -> float:
    """The bandwidth at which all of fetching takes as long, after `tried` at another one: what fetching took there
    beyond the link's own time stays as it was. At most four times the other."""
    beside = tried.fetch / len(tried.seconds) - tried.per_token / bandwidth
    return balance(tried.per_token, max(computing - beside, tried.per_token / bandwidth / 4))


def run(stage: Stage) -> Result:
    context, steps = (640, 6) if stage.quick else (CONTEXT, STEPS)
    hot = 256 if stage.quick else HOT
    subject = setup.subject()
    ids = setup.prose(subject.text, context + (3 + len(FACTORS)) * steps)
    rows: list[Row] = []
    for name in POLICIES:
        rows += _policy(subject.model, name, ids, context, steps, hot, HIDDEN, stage)
    return Result("longctx-pipeline", rows, {"context_tokens": context, "steps_each": steps}, [
        f"modelled: {subject.name}, {context} tokens of English, hot_tokens={hot}, host memory behind a modelled link "
        f"with {LATENCY * 1e6:g} us of latency, {steps} teacher-forced steps at each bandwidth, real threads",
    ])  # fmt: skip


def _policy(
    model: Any, name: str, ids: torch.Tensor, context: int, each: int, hot: int, target: Target | None, stage: Stage
) -> Iterator[Row]:
    what = f"{name}: share of fetching time hidden"
    if stage.over:
        yield left_out(f"{what}, at balance", "", target, SKIPPED)
        return
    queue = LinkQueue(UNLIMITED)
    with attach(model, name, hot_tokens=hot) as attached:
        cache = prefilled(
            model, attached, ids[:, :context], TieredCache(model.config, name, hot_tokens=hot, link=queue)
        )
        text = iter(ids[:, context:].split(each, dim=1))
        decode(model, cache, next(text))  # not counted: pools fill up
        recorder = recording(cache)
        free = decode(model, cache, next(text))
        events = list(recorder.events)
        bare = balance(free.per_token, free.computing)
        queue.link = ModelledLink(bare, LATENCY)
        at = balanced(decode(model, cache, next(text)), bare, free.computing)
        for factor, tokens in zip(FACTORS, text, strict=True):
            bound = target if factor == 1 else None
            where = f"{what}, at balance" if factor == 1 else f"{what}, at {factor:g} x balance"
            if stage.over:
                yield left_out(where, "", bound, SKIPPED)
                continue
            queue.link = ModelledLink(factor * at, LATENCY)
            yield from judged(where, bound, decode(model, cache, tokens), queue.link)
            clocked = replay(events, ModelledLink(factor * bare, LATENCY))
            share = hidden(clocked.fetch, clocked.stall)
            beside = f"modelled: {factor * bare / 1e6:.3g} MB/s, the run without a limit"
            yield one("  hidden on a virtual clock, where only the link takes time", "", share, None, beside)
            if factor == 1:
                waiting = f"{1e3 * free.stall / len(free.seconds):.1f} ms of waiting beside it"
                yield one("  computation of a token, link without a limit", "ms", free.computing * 1e3, None, waiting)
                yield one("  bytes up a token, link without a limit", "KiB", free.per_token / 1024)
        cache.close()


def judged(where: str, target: Target | None, found: Steps, link: ModelledLink) -> Iterator[Row]:
    stalled = stats.ratio_of_paired_means(list(zip(found.stalls, found.fetches, strict=True)))
    low, high = max(0.0, 1 - stalled.high), max(0.0, 1 - stalled.low)
    estimate = stats.Estimate(found.hidden, low, high, stalled.count)
    ratio = found.fetch / len(found.seconds) / found.computing
    beside = f"modelled: {link.bandwidth / 1e6:.3g} MB/s, fetching takes {ratio:.2f} x what computing takes"
    more: dict[str, str | int | float | None] = {"modelled": "yes", "bytes_per_s": link.bandwidth}
    if target is not None and ratio < BALANCED:
        yield Row(where, "", None, target, f"no balance: {beside}; {found.hidden:.3f} was hidden", more)
    else:
        yield Row(where, "", estimate, target, beside, more)
    yield Row("  a token", "ms", stats.mean(found.seconds).times(1e3))
    yield Row("  of that, waiting", "ms", stats.mean(found.stalls).times(1e3))
    yield Row("  fetching for a token", "ms", stats.mean(found.fetches).times(1e3))


@torch.no_grad()
def prefilled(model: Any, attached: Attached, ids: torch.Tensor, cache: TieredCache) -> TieredCache:
    attached.prefill(ids, cache)
    model(ids[:, cache.get_seq_length() :], past_key_values=cache, logits_to_keep=1)
    return cache


@torch.no_grad()
def decode(model: Any, cache: TieredCache, ids: torch.Tensor) -> Steps:
    """One step for each of these tokens."""
    ledger = cache.ledger
    seconds, stalls, fetches = [], [], []
    before = ledger.cold_to_hot()
    for token in ids.unbind(1):
        began, stall, fetch = time.perf_counter(), ledger.seconds["stall"], ledger.seconds["fetch"]
        model(token[:, None], past_key_values=cache)
        seconds.append(time.perf_counter() - began)
        stalls.append(ledger.seconds["stall"] - stall)
        fetches.append(ledger.seconds["fetch"] - fetch)
    return Steps(seconds, ledger.cold_to_hot() - before, sum(fetches), sum(stalls), stalls, fetches)
