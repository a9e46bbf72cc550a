"""Writes the tables of reasons in docs/troubleshooting.md; `--check` says whether they are the same.

Reasons are why blocks are not recalled or not spilled, in the words of answers, counters and metrics. A test holds the
page against the code that gives them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs/troubleshooting.md"
WELL = "<!-- reasons of the well: made by scripts/reasons_page.py -->"
ENGINE = "<!-- reasons of engines: made by scripts/reasons_page.py -->"
SPILL = "<!-- reasons of no spill: made by scripts/reasons_page.py -->"
END = "<!-- end -->"


@dataclass(frozen=True, slots=True)
class Reason:
    """`name` is the value of the label `reason`. `advice` says what an operator can do."""

    name: str
    meaning: str
    advice: str


BY_WELL = (
    Reason(
        "never_seen",
        "No block of this prefix, model, page size and salt has been stored since the tier was last emptied, or it was "
        "evicted so long ago that the well does not remember it.",
        "Nothing if prompts do not repeat. If they do: is it the same model, page size and `cache_salt`?",
    ),
    Reason("evicted", "The block was stored, and its room was needed for others.", "A larger `host`, or a `disk`."),
    Reason(
        "filling",
        "Another engine is writing the block at this moment.",
        "Nothing: the next request finds it.",
    ),
    Reason(
        "mapping",
        "A worker of the engine has not mapped the slab of the block yet.",
        "Nothing in an engine's first seconds. If it stays, the engine's log says why ([SW-208](#sw-208) for example).",
    ),
    Reason(
        "pins",
        "Waiting requests hold as much of host memory as `pin_waiting` allows.",
        "A larger `host`; a larger `pin_waiting` if engines rarely spill at the same time.",
    ),
    Reason(
        "no_room",
        "All slots of host memory are being filled or copied, so nothing can be read from the tier.",
        "A larger `host` if it goes on.",
    ),
    Reason(
        "not_readable",
        "The block was gone or damaged when it was read from the tier, or the read failed.",
        "`stepwell cache fsck DIR`; the well's log says more ([SW-507](#sw-507)).",
    ),
    Reason(
        "tier_down",
        "The tier has not answered for a second, or has failed three times in a row. It is asked again after a trial "
        "read, which the well makes by itself, has succeeded.",
        "`dmesg`, `iostat -x 1`; look for others that write to the device. Nothing if it was a moment.",
    ),
    Reason(
        "recompute_cheaper",
        "Computing is expected to be faster than reading from the tier.",
        "`stepwell explain --decisions`; a faster disk, or several directories. Nothing if it is so.",
    ),
    Reason(
        "late",
        "The blocks were being read, and waiting for the rest would have taken longer than computing it.",
        "As for `recompute_cheaper`.",
    ),
    Reason(
        "never",
        "The setting `recall`, or the request itself, says `never`.",
        "Set `recall` to `auto`.",
    ),
    Reason(
        "paused",
        "`stepwell pause` has switched recalls off; the first line of `stepwell stats` says who, when and why.",
        "`stepwell resume`, when the cause is gone.",
    ),
    Reason(
        "quarantined",
        "The namespace holds blocks that were computed with other weights.",
        "See [SW-406](#sw-406).",
    ),
    Reason(
        "queue_full",
        "The engine has more questions waiting than the well keeps: 128 MiB of digests, or 512 MiB of all engines.",
        "Fewer requests at a time for each engine.",
    ),
)
"""Reasons of the well: `stepwell_missed_blocks_total` counts blocks by them, `stepwell_engine_missed_requests_total`
requests."""

BY_ENGINE = (
    Reason(
        "no_session",
        "The engine had not joined a well when the request came: it has just started, its model's weights are still "
        "being hashed, or the well is gone.",
        "Nothing if it is soon over. Otherwise look for `stepwell` in the engine's log.",
    ),
    Reason("well_lost", "The well was lost while the request waited.", "See [SW-504](#sw-504)."),
    Reason(
        "gave_way",
        "A recall was on its way to several ranks of the engine, and one of them has given it up.",
        "As for `too_slow`.",
    ),
    Reason(
        "too_slow",
        "No answer, or no further block, came within the limits of waiting.",
        "A busy host, a slow disk, or a well that hangs: see `stepwell stats` and [SW-503](#sw-503).",
    ),
    Reason(
        "no_window",
        "The prefix is there, and what layers with a window or a state need is at no place in it: two prompts part "
        "there for the first time, or it was evicted.",
        "Nothing: a window is stored now. If it goes on, a larger arena or disk (`stepwell explain` says what lacks).",
    ),
    Reason("short_prompt", "The prompt is shorter than one block.", "Nothing; or a smaller `block_tokens`."),
    Reason(
        "adapter",
        "The content of the request's LoRA adapter is not certain.",
        "A local folder for each version, never changed ([adapters](vllm.md#adapters)).",
    ),
    Reason(
        "adapter_unread", "The files of the LoRA adapter are still being read.", "Nothing: later requests are served."
    ),
    Reason("multimodal", "The request has images, sound or video.", "Nothing: such requests are not served yet."),
    Reason("prompt_embeds", "The prompt is given as embeddings.", "Nothing: such requests are not served yet."),
    Reason(
        "streamed_prompt",
        "The prompt is still growing while it is computed.",
        "Nothing: such requests are not served yet.",
    ),
)
"""Reasons that engines give for requests: `stepwell_engine_missed_requests_total`. `stepwell stats` shows them, too,
but for `well_lost` and `gave_way`: as `missed_` (the first group) and `bypassed_` (requests that are not served)."""

BY_SPILL = (
    Reason("resident", "The block is there already.", "Nothing."),
    Reason("filling", "Another engine, or another request, is writing it.", "Nothing."),
    Reason(
        "no_room",
        "All slots of host memory are in use: filled, copied, pinned or waiting to be written to the tier, for a "
        "second where there is one. Of a long context the rest is tried again with the next step.",
        "A larger `host`; a faster disk if it has one.",
    ),
    Reason(
        "not_worth_it",
        "Host memory is full of blocks that are expected to save more, and there is no tier below it.",
        "Nothing; a larger `host`, or a `disk`, to keep more.",
    ),
    Reason("no_parent", "The block before it is stored nowhere, so that nothing could find it.", "Nothing."),
    Reason(
        "abandoned",
        "The engine gave the slots back before the block was written: the request was aborted or preempted, or a rank "
        "was lost.",
        "Nothing; if it is most of them, look at preemptions in the engine's log.",
    ),
    Reason("paused", "`stepwell pause` has switched spills off.", "`stepwell resume`, when the cause is gone."),
    Reason("quarantined", "The namespace holds blocks of other weights.", "See [SW-406](#sw-406)."),
    Reason("queue_full", "More is waiting than the bounds allow.", "Fewer requests at a time; a faster disk."),
    Reason(
        "gone", "Host memory needed the room before the tier had taken the block.", "A faster disk, or more `host`."
    ),
    Reason("no_space", "The directories of the tier are full, or `disk_reserve` would be touched.", "`df -h DIR`."),
    Reason("too_large", "The block does not fit into a segment of the tier.", "A larger `disk`."),
    Reason("failed", "The device or filesystem refused the write.", "See [SW-507](#sw-507)."),
)
"""Reasons of the well for blocks that a tier did not take: `stepwell_spill_skipped_blocks_total`, by tier."""


def table(reasons: tuple[Reason, ...]) -> str:
    rows = [f"| `{reason.name}` | {reason.meaning} | {reason.advice} |" for reason in reasons]
    return "\n".join(["| reason | meaning | what to do |", "|---|---|---|", *rows])


def page(text: str) -> str:
    for mark, reasons in ((WELL, BY_WELL), (ENGINE, BY_ENGINE), (SPILL, BY_SPILL)):
        before, rest = text.split(mark)
        text = f"{before}{mark}\n{table(reasons)}\n{END}{rest.split(END, 1)[1]}"
    return text


def main() -> int:
    text = PAGE.read_text()
    new = page(text)
    if "--check" in sys.argv:
        if new != text:
            print("docs/troubleshooting.md has other reasons than the code: run scripts/reasons_page.py")
        return int(new != text)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
