"""VERIFIED: the same greedy tokens as plain transformers, how many drafts a check accepts, and what is streamed.

Documents of the fidelity suite are answered greedily by plain transformers and through `attach(policy="verified")`.
Where the two part ways, full attention's two best logits there tell whether it was a near tie (less than `TIE` apart);
the comparison goes on behind full attention's own token in any case. Documents are compared in small batches, which
is all that time allows for ten thousand tokens; acceptance and bytes are of single rows.

What was compared is kept beside the results (`longctx-verified.parts.json`), and a later run goes on from there as long
as neither stepwell nor the documents have changed: call it again until every document has had its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lab.bench.longctx import setup
from lab.bench.longctx.parts import Parts
from lab.bench.longctx.setup import left_out, one
from lab.bench.longctx.stage import SKIPPED, Stage
from lab.bench.report import Result, Row, Target
from stepwell.demo.results import stats
from stepwell.fidelity.document import Document
from stepwell.fidelity.prefill import Prefilled, prefill
from stepwell.fidelity.text import Text
from stepwell.longctx import TieredCache, attach, policies
from stepwell.longctx.parts.select.topk import TopK

TIE = 1e-3
SAME, ENOUGH, ACCEPTED, BYTES = Target("<=", 0), Target(">=", 10_000), Target(">=", 8), Target("<=", 1 / 6)
BUDGETS = (0.125, 0.0625, 0.25)
"""Shares of the context that a draft step selects; the one that is judged comes first."""
SUITE = ("kvtable", "nat", "json_extract", "multi_needle", "variable_tracking", "copy_span")
HOT = 256


@dataclass(frozen=True, slots=True)
class Size:
    """`batches`: (task, prompt tokens) of each batch of `rows` documents, `tokens` generated for each. `alone`: of the
    suite's tasks, one document each in a row of its own; `exact`: exact steps beside it."""

    batches: tuple[tuple[str, int], ...]
    rows: int
    tokens: int
    alone: tuple[str, ...]
    alone_prompt: int
    alone_tokens: int
    exact: int


FULL = Size(
    tuple([("nat", 1024), ("kvtable", 1024), ("nat", 1024), ("kvtable", 2048), ("nat", 2048), ("kvtable", 1024)] * 2),
    4,
    216,
    SUITE,
    2048,
    96,
    4,
)
QUICK = Size((("kvtable", 512),), 2, 12, ("nat",), 512, 12, 2)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of generated tokens. `ties`, `mismatches`: places where the two parted, by what full attention's two best were
    like there."""

    tokens: int = 0
    ties: int = 0
    mismatches: int = 0

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(self.tokens + other.tokens, self.ties + other.ties, self.mismatches + other.mismatches)


def agreement(
    full: Sequence[int], gaps: Sequence[float], ours: Sequence[int], go_on: Callable[[int], Sequence[int]]
) -> Agreement:
    """`full`: full attention's tokens; `gaps`: between its two best logits at each; `ours`: the others' tokens;
    `go_on(n)`: the others' tokens behind the first n of full attention's, down to its end."""
    ties = mismatches = 0
    start = 0
    while True:
        parted = next((at for at in range(start, len(full)) if ours[at - start] != full[at]), None)
        if parted is None:
            return Agreement(len(full), ties, mismatches)
        if gaps[parted] < TIE:
            ties += 1
        else:
            mismatches += 1
        start = parted + 1
        ours = go_on(start) if start < len(full) else ()


def run(stage: Stage) -> Result:
    size = QUICK if stage.quick else FULL
    subject = setup.subject()
    # So that kept parts are never of other documents or another size.
    parts = Parts.open(stage.kept, "longctx-verified", f"{size} {HOT} {setup.SEED} {subject.name}")
    for task in size.alone:
        if f"alone {task}" not in parts and parts.time_for("alone", stage):
            parts.add(
                f"alone {task}", _alone(subject.model, _asked(subject.text, task, size.alone_prompt), size), stage
            )
    for number, (task, tokens) in enumerate(size.batches):
        name = f"batch {number}: {task}, {tokens} tokens"
        if name not in parts and parts.time_for("batch", stage):
            batch = _batch(subject.text, task, tokens, range(number * size.rows, (number + 1) * size.rows))
            parts.add(name, _compare(subject.model, batch, size.tokens), stage)
    done = [found for name, found in parts.items() if name.startswith("batch")]
    rows = [*agreement_rows(done), *alone_rows(parts, size)]
    left = len(size.batches) - len(done)
    told = f"; {left} batches of documents are left: run it again, it goes on" if left else ""
    counts = {"documents": len(done) * size.rows, "batches_left": left}
    return Result("longctx-verified", rows, counts, [
        f"{subject.name}: English and tables of 1K and 2K tokens, {size.rows} documents at a time, {size.tokens} "
        f"tokens generated for each, hot_tokens={HOT}, host memory, policy 'verified' (2-bit token scores, K8V4 "
        f"drafts){told}",
    ])  # fmt: skip


def agreement_rows(done: Sequence[dict[str, float]]) -> list[Row]:
    total = sum((Agreement(int(one["tokens"]), int(one["ties"]), int(one["mismatches"])) for one in done), Agreement())
    what = "tokens that differ from full attention's, near ties aside"
    if not done:
        return [left_out(what, "", SAME, SKIPPED)]
    return [
        one(what, "", total.mismatches, SAME, f"of {total.tokens} generated"),
        one("generated tokens compared", "", total.tokens, ENOUGH),
        one(
            "  near ties, continued from full attention's token",
            "",
            total.ties,
            None,
            f"its two best less than {TIE:g} apart",
        ),
    ]


def alone_rows(parts: Parts, size: Size) -> list[Row]:
    found = {task: parts[f"alone {task}"] for task in size.alone if f"alone {task}" in parts}
    rows = []
    for budget in BUDGETS:
        judged = budget == BUDGETS[0] and len(found) in (0, len(size.alone))  # a part of the suite has no mean of it
        where, key = f"budget {100 * budget:g} %", f"{budget:g}"
        per_check, share = f"accepted tokens per check, {where}", f"bytes up per token over EXACT's, {where}"
        if not found:
            rows.append(left_out(per_check, "", ACCEPTED if judged else None, SKIPPED))
            rows.append(left_out(share, "", BYTES if judged else None, SKIPPED))
            continue
        accepted = [each[f"accepted {key}"] / each[f"checks {key}"] for each in found.values()]
        ratios = [each[f"bytes {key}"] / each["exact bytes"] for each in found.values()]
        named = ", ".join(f"{task} {value:.1f}" for task, value in zip(found, accepted, strict=True))
        rows.append(Row(per_check, "", stats.mean(accepted), ACCEPTED if judged else None, named))
        rows.append(Row(share, "", stats.mean(ratios), BYTES if judged else None, "mean of documents, by the ledger"))
        agreed = sum(each[f"accepted {key}"] for each in found.values())
        drafted = sum(each[f"drafted {key}"] for each in found.values())
        rows.append(one("  share of the drafted tokens that was accepted", "", agreed / drafted))
    return rows


def _asked(text: Text, task: str, tokens: int) -> torch.Tensor:
    """[1, n]: a document and the beginning of its answer, so that the model goes on with the task."""
    made = setup.document(text, task, tokens)
    return setup.row(made, made.fields[0].stop + 1 if made.fields else 1)


def _batch(text: Text, task: str, tokens: int, numbers: Sequence[int]) -> torch.Tensor:
    """[rows, n]: as long as the shortest of them, by what they begin with."""
    made = [setup.document(text, task, tokens, number) for number in numbers]
    rows = [setup.row(one, one.fields[0].stop + 1 if one.fields else 1) for one in made]
    least = min(row.shape[1] for row in rows)
    return torch.cat([row[:, row.shape[1] - least :] for row in rows])


def _compare(model: Any, batch: torch.Tensor, tokens: int) -> dict[str, float]:
    full, gaps = _plain(model, batch, tokens)
    ours = _verified(model, batch, tokens, "verified")
    found = Agreement()
    for at in range(len(batch)):

        def go_on(count: int, at: int = at) -> Sequence[int]:
            ids = torch.cat([batch[at], full[at, :count]])[None]
            more: list[int] = _verified(model, ids, tokens - count, "verified")[0].tolist()
            return more

        found += agreement(full[at].tolist(), gaps[at].tolist(), ours[at].tolist(), go_on)
    return {"tokens": found.tokens, "ties": found.ties, "mismatches": found.mismatches}


def _plain(model: Any, ids: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens [rows, tokens] and how far apart the two best logits were."""
    answer = model.generate(ids, **_greedy(tokens), return_dict_in_generate=True, output_logits=True)
    best = torch.stack(answer.logits, 1).topk(2, -1).values
    return answer.sequences[:, ids.shape[1] :], best[..., 0] - best[..., 1]


def _verified(model: Any, ids: torch.Tensor, tokens: int, policy: Any) -> torch.Tensor:
    with attach(model, policy, hot_tokens=HOT):
        found: torch.Tensor = model.generate(ids, **_greedy(tokens))
    return found[:, ids.shape[1] :]


def _greedy(tokens: int) -> dict[str, Any]:
    """Of exactly so many tokens: without an end, or all rows of a batch would wait for the last. Other processing of
    logits than taking the best has no part in what is compared."""
    return {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def _alone(model: Any, ids: torch.Tensor, size: Size) -> dict[str, float]:
    """One row at each budget: what was drafted, accepted and streamed behind the prompt; and what EXACT streams at the
    same hot budget."""
    prompt = prefill(model, [Document(tuple(ids[0].tolist()), (0,), (), 0)])
    found = {"exact bytes": _exact_bytes(model, prompt, size.exact)}
    for budget in BUDGETS:
        policy = replace(policies.named("verified"), selector=TopK(budget))
        cache = TieredCache(model.config, policy, hot_tokens=HOT)
        cache.adopt(prompt.dense, prompt.queries)
        with attach(model, policy, hot_tokens=HOT):
            model.generate(ids, past_key_values=cache, **_greedy(size.alone_tokens))
        ledger = cache.ledger
        counted = {"drafted": ledger.drafted, "accepted": ledger.accepted, "checks": ledger.verifies}
        counted["bytes"] = ledger.cold_to_hot() // ledger.generated
        found |= {f"{name} {budget:g}": value for name, value in counted.items()}
        cache.close()
    return found


@torch.no_grad()
def _exact_bytes(model: Any, prompt: Prefilled, steps: int) -> float:
    """Of a step behind the prompt; which tokens it is given does not matter."""
    cache = TieredCache(model.config, "exact", hot_tokens=HOT)
    cache.adopt(prompt.dense, prompt.queries)
    with attach(model, "exact", hot_tokens=HOT):
        for _ in range(steps):
            model(prompt.feed[:1], past_key_values=cache)
    found = cache.ledger.cold_to_hot() / steps
    cache.close()
    return found
