"""Time to first token of a prompt recalled from host memory, over an engine hit of as many cached tokens.

As in the demo, with more pairs and one engine: a pool for a quarter of the documents, each asked about in turn and at
once again. The first answer is a recall and the second an engine hit, so recalls and hits alternate; vLLM itself says
what was cached, and unfair pairs are dropped and counted. Receipts say where the recall's own time went.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lab.bench.report import Result, Row, Target
from lab.bench.serving import engines
from stepwell.demo import documents as library
from stepwell.demo.results import stats
from stepwell.demo.results.measure import Pair, counted, drops, ratio
from stepwell.demo.wire import Answer

TARGETS = {128: 1.05, 32: 1.12}
"""By tokens of an engine page."""

RECEIPT = {
    "recall_ms": "    of it, first ask to loaded (receipt)",
    "wait_ms": "      of it, first ask to offered",
    "copy_ms": "      of it, copying",
}
"""Parts of a recall's time, as its receipt tells them."""

_OUTPUT = 4
_HOST = 2 << 30


@dataclass(frozen=True, slots=True)
class Size:
    documents: int
    rounds: int


FULL, QUICK = Size(8, 12), Size(4, 2)


def run(quick: bool) -> Result:
    size = QUICK if quick else FULL
    rows: list[Row] = []
    counts: dict[str, int] = {}
    for page, target in TARGETS.items():
        pairs = _pairs(page, size)
        fair = counted(pairs)
        rows += _rows(page, target, fair)
        counts[f"pairs_page_{page}"] = len(fair)
        counts[f"dropped_page_{page}"] = len(pairs) - len(fair)
        counts[f"identical_page_{page}"] = sum(pair.identical for pair in fair)
        counts |= {f"dropped_page_{page}_{reason.name.lower()}": count for reason, count in drops(pairs).items()}
    remarks = [
        f"{size.documents} documents of 2,000 to 2,900 tokens and a question, bf16, one request at a time, default "
        "processes; the extra time is the recall's minus its pair's hit"
    ]
    return Result("ttft", rows, counts, remarks)


def _pairs(page: int, size: Size) -> list[Pair]:
    # A block is a page, so that both parts of a pair have the same tokens cached.
    with engines.bench(_HOST, settings={"block_tokens": page}) as bench:
        chosen = library.choose(bench.encode, size.documents, page)
        pages = engines.pages_for([len(document.prompt) for document in chosen], _OUTPUT, page)
        pool = max(sum(pages) // 4, max(pages) + 1)
        pairs: list[Pair] = []
        with (
            bench.engine(f"page-{page}", engines.Shape(page, pool, max(pages) * page)) as engine,
            bench.progress.steps(f"page {page}: recalls and hits in turn", size.documents * (size.rounds + 1)) as step,
        ):
            for number in range(size.rounds + 1):
                for at, document in enumerate(chosen):
                    prompt = list(document.prompt)
                    pair = Pair(at, engine.ask(prompt, _OUTPUT), engine.ask(prompt, _OUTPUT))
                    step(document.name)
                    if number:  # the first time all is computed
                        pairs.append(pair)
        return pairs


def _rows(page: int, target: float, pairs: Sequence[Pair]) -> list[Row]:
    where = f"engine page {page}"
    found = ratio([pair.ratio for pair in pairs])
    if found is None:
        return [Row(f"TTFT recalled over an engine hit, {where}", "", None, Target("<=", target), "no fair pair")]
    estimate = stats.Estimate(found.median, found.low, found.high, found.count)
    rows = [
        Row(f"TTFT recalled over an engine hit, {where}", "", estimate, Target("<=", target)),
        Row("  recalled", "ms", stats.median([pair.recall.ttft_s for pair in pairs]).times(1e3)),
        Row("  engine hit", "ms", stats.median([pair.hit.ttft_s for pair in pairs]).times(1e3)),
        Row("  extra", "ms", stats.median([pair.recall.ttft_s - pair.hit.ttft_s for pair in pairs]).times(1e3)),
    ]
    receipts = [(pair, receipt(pair.recall)) for pair in pairs if "recall_ms" in receipt(pair.recall)]
    for name, what in RECEIPT.items():
        values = [told[name] for _, told in receipts if name in told]
        if values:
            rows.append(Row(what, "ms", stats.median(values)))
    rest = [1e3 * (pair.recall.ttft_s - pair.hit.ttft_s) - told["recall_ms"] for pair, told in receipts]
    if rest:
        rows.append(Row("    the rest of the extra: the step more, and noise", "ms", stats.median(rest)))
    return rows


def receipt(answer: Answer) -> dict[str, float]:
    """What stepwell says of the request: the numbers of it."""
    told = (answer.kv_transfer_params or {}).get("stepwell", {})
    return {name: value for name, value in told.items() if isinstance(value, int | float)}
