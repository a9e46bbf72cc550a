"""Named policies: published systems as configurations of our parts, and our own.

A paper's policy is here as its text has it, with the gaps of the text filled in (noted beside each); it is a
reproduction of the policy, not of the system. A distribution with an entry point in the group
`stepwell.longctx.policies` adds one by its name: the entry point names a `Policy`, or a function that returns one.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import entry_points

from stepwell.errors import ConfigError
from stepwell.longctx.parts.codec.plain import Half
from stepwell.longctx.parts.codec.quantised import Quantised
from stepwell.longctx.parts.index.exact import TrueKeys
from stepwell.longctx.parts.index.landmark import MeanLandmark
from stepwell.longctx.parts.index.minmax import MinMax
from stepwell.longctx.parts.index.rotated import RotatedKeys
from stepwell.longctx.parts.residency.hitrate import HitRate
from stepwell.longctx.parts.residency.lru import Fifo
from stepwell.longctx.parts.residency.periodic import Periodic
from stepwell.longctx.parts.residency.window import StepWindow
from stepwell.longctx.parts.select.controls import RandomPages, Recent
from stepwell.longctx.parts.select.topk import TopK, TopP
from stepwell.longctx.policy import AttentionMode, Policy

GROUP = "stepwell.longctx.policies"

STEPWELL = Policy(
    "stepwell",
    index=RotatedKeys(bits=2, centred=True),
    selector=TopP(mass=0.97, floor=0.03, ceiling=0.25),
    residency=StepWindow(steps=64),
    codec=Quantised(8, 4),
    page_tokens=16,
    prefetch=True,
    lookahead=2,
    late_mass=0.02,
)
"""Two-bit centred token scores summed by page; as many pages as the estimated mass asks for; pages kept as long as
there is room, by their present mass; 8-bit keys and 4-bit values in cold tiers; early fetches two layers ahead. A step
waits for a page that was not predicted only if a head gives it 2 % of its attention; the rest arrives for the next step
(measured: never waiting doubles the KL on tables, waiting for all hides a fifth less of the fetching). A window of a
few steps would empty a pool that has room: measured, up to ten hits of a hundred less."""

_TOKENS = replace(
    STEPWELL,
    name="stepwell-tokens",
    page_tokens=1,
    joint=False,
    prefetch=False,
    late_mass=None,
    selector=TopP(0.97, 0.03, 0.125),
)
"""The same by single tokens of single KV heads: for the host tier, where small reads cost little."""

_NAMED = {
    policy.name: policy
    for policy in (
        STEPWELL,
        _TOKENS,
        Policy("exact", AttentionMode.EXACT, window=None),
        replace(_TOKENS, name="verified", mode=AttentionMode.VERIFIED, selector=TopK(0.125), draft_tokens=32),
        # Landmarks are means of pages, not of k-means clusters; windows are divided among layers, not heads.
        Policy(
            "kvdrive",
            index=MeanLandmark(),
            selector=TopK(0.0625),
            residency=StepWindow(steps=8),
            codec=Half(),
            joint=False,
            attend_hot=False,
            profile_steps=32,
        ),
        # The paper does not say how blocks are scored: min/max here.
        Policy(
            "ttkv",
            index=MinMax(),
            selector=TopK(0.43),
            codec=Quantised(8, 4),
            page_tokens=128,
            window=None,
        ),
        # One interval of recalls for all layers, where the paper profiles each.
        Policy(
            "scout",
            index=MinMax(),
            selector=TopK(0.125),
            residency=Periodic(every=8),
            codec=Half(),
            page_tokens=32,
            query="ahead",
            executor="in_place",
            predicted_math=True,
        ),
        # Keys rotated and on a normal distribution's grid in place of plain INT4; 64 recent tokens rather than a share;
        # hot pages are attended over anyway; scoring is not balanced between devices
        Policy(
            "hillinfer",
            index=RotatedKeys(bits=4, centred=False),
            selector=TopK(0.15),
            residency=HitRate(),
            codec=Half(),
            page_tokens=1,
            joint=False,
            executor="near_data",
        ),
        # Scalar grids in place of two- and four-dimensional ones.
        Policy(
            "yakv",
            index=RotatedKeys(bits=2, centred=False),
            selector=TopK(0.03125),
            codec=Quantised(4, 4),
            page_tokens=1,
            joint=False,
        ),
        # Controls: what any policy has to beat at equal bytes, and what none can.
        Policy("oracle", index=TrueKeys(), selector=TopK(0.125), page_tokens=1, joint=False),
        Policy("recency", index=MinMax(), selector=Recent(0.125), residency=Fifo()),
        Policy("random", index=MinMax(), selector=RandomPages(0.125)),
    )
}
names = tuple(_NAMED)


def named(name: str) -> Policy:
    """The policy of this name. Raises ConfigError SW-131 if there is none, or if what an entry point names is none."""
    if name in _NAMED:
        return _NAMED[name]
    for entry in entry_points(group=GROUP, name=name):
        found = entry.load()
        policy = found if isinstance(found, Policy) else found()
        if isinstance(policy, Policy):
            return policy
        raise _unknown(f"its entry point {entry.value} gives a {type(policy).__name__}, not a Policy")
    raise _unknown(f"there are {', '.join(names)}, and what entry points in {GROUP} add")


def _unknown(why: str) -> ConfigError:
    return ConfigError(
        "SW-131",
        what="there is no long-context policy of this name",
        why=why,
        fix="use one of these names, or give a stepwell.longctx.Policy",
    )
