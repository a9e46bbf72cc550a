"""Half of the working set: what the default policy keeps of it, beside LRU, where users come one after the other, and
where some come more often than others.

Each user has a prompt, of which a tenth is shared by all. The well has no disk tier, and its host tier has room for
half of the blocks of all prompts. In a cycle LRU drops each prompt shortly before it is asked again; who keeps a part
of them hits that part. With Zipf-skewed draws recency is nearly as good a guide as any, and LRU is hard to beat. The
first round, as many prompts as there are users, is not judged. `inturn` says how the engines are kept apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lab.bench.report import Result, Row, Target
from lab.bench.serving import engines, workloads
from lab.bench.serving.engines import Shape
from lab.bench.serving.inturn import First, ask_all, blocks_of
from stepwell.demo.results import stats

OURS, LRU = "auto", "lru"
PAGE = 32
USERS, SHARED, OWN, TAIL = 18, 2, 17, 7
"""Users; blocks that they share, and blocks of each; tokens behind the last block, which are always computed."""

HIT, SECONDS = 0.40, 0.72
_SEED = 1

Pair = tuple[First, First]
"""The same prompt, with `auto` and with LRU."""


@dataclass(frozen=True, slots=True)
class Size:
    """Of both workloads, in rounds of as many prompts as there are users; the first is not judged."""

    cyclic: int
    zipf: int


FULL, QUICK = Size(5, 14), Size(2, 2)


def run(quick: bool) -> Result:
    size = QUICK if quick else FULL
    rows: list[Row] = []
    counts: dict[str, int] = {}
    with engines.bench(0) as bench:
        blocks = blocks_of(bench, PAGE)
        half = (SHARED + USERS * OWN) // 2
        host_bytes = blocks.host_bytes(half)
        tokens = (SHARED + OWN) * blocks.tokens + TAIL
        shape = Shape(PAGE, 2 * tokens // PAGE, tokens + PAGE)
        text = workloads.text(bench.encode)
        prompts = workloads.users(text, USERS, SHARED * blocks.tokens, OWN * blocks.tokens + TAIL)
        for name, order, judge in (
            ("cyclic", workloads.cyclic(USERS, size.cyclic), cyclic_rows),
            ("Zipf", workloads.zipf(USERS, USERS * size.zipf, _SEED), zipf_rows),
        ):
            asked = ask_all(bench, (OURS, LRU), host_bytes, shape, [prompts[user] for user in order], name)
            pairs = list(zip(asked[OURS].firsts[USERS:], asked[LRU].firsts[USERS:], strict=True))
            rows += judge(pairs)
            counts[f"{name}_prompts"] = len(pairs)
            for policy, found in asked.items():
                counts[f"{name}_slots_{policy}"] = found.slots
                counts |= {f"{name}_{policy}_{what}": count for what, count in found.recalls.items()}
    remarks = [
        f"{USERS} users with prompts of {tokens} tokens, of which {SHARED * blocks.tokens} are shared; engine page "
        f"{PAGE}, blocks of {blocks.tokens} tokens, room for {half} of {SHARED + USERS * OWN} blocks; one request at a "
        "time, no canaries; CPU seconds are those of all processes of engine and well"
    ]
    return Result("half", rows, counts, remarks)


def cyclic_rows(pairs: Sequence[Pair]) -> list[Row]:
    ours = Row("cyclic: prompt tokens hit, auto", "", _share(pairs, 0), Target(">=", HIT))
    lru = Row("  lru", "", _share(pairs, 1))
    return [ours, lru, *_seconds("cyclic", pairs, Target("<=", SECONDS))]


def zipf_rows(pairs: Sequence[Pair]) -> list[Row]:
    over = stats.ratio_of_paired_means([(a.hit, b.hit) for a, b in pairs]) if any(b.hit for _, b in pairs) else None
    return [
        Row("Zipf: prompt tokens hit, auto over lru", "", over, Target(">=", 1.0)),
        Row("  auto", "", _share(pairs, 0)),
        Row("  lru", "", _share(pairs, 1)),
        *_seconds("Zipf", pairs, Target("<=", 1.0)),
    ]


def _share(pairs: Sequence[Pair], which: int) -> stats.Estimate | None:
    shares = [pair[which].hit / pair[which].tokens for pair in pairs]
    return stats.mean(shares) if shares else None  # all prompts are of one length


def _seconds(name: str, pairs: Sequence[Pair], target: Target) -> list[Row]:
    cpu = [(a.cpu_s, b.cpu_s) for a, b in pairs if a.cpu_s is not None and b.cpu_s is not None]
    what = f"{name}: mean CPU seconds to first token, auto over lru"
    if not cpu:
        return [Row(what, "", None, target, "no prompt was measured with both")]
    wall = [(a.wall_s, b.wall_s) for a, b in pairs]
    return [
        Row(what, "", stats.ratio_of_paired_means(cpu), target, f"of {len(cpu)} prompts"),
        *(Row(f"  {policy}", "s", stats.mean([pair[at] for pair in cpu])) for at, policy in enumerate((OURS, LRU))),
        Row(f"{name}: mean TTFT, auto over lru", "", stats.ratio_of_paired_means(wall)),
        *(Row(f"  {policy}", "s", stats.mean([pair[at] for pair in wall])) for at, policy in enumerate((OURS, LRU))),
    ]
