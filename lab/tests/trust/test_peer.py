"""The campaign over vLLM's tier and ours as far as it needs no engine: harm that is done, and what counts as broken."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lab.trust.budget import Budget
from lab.trust.engine.prompts import OUTPUT, Prompt
from lab.trust.format.images import Image
from lab.trust.format.made import Maker
from lab.trust.peer import module
from lab.trust.peer.harm import HANG, HARMS, Harm
from lab.trust.peer.seen import Hung, Seen
from lab.trust.peer.subjects import FsTier, Subject, WellTier
from stepwell.demo.wire import Answer
from stepwell.testing.fuse import why_not

PROMPT = Prompt((1, 2, 3), tuple(range(OUTPUT)), (-0.5,) * OUTPUT)
RIGHT = Answer(0.5, 0.6, 3, list(range(OUTPUT)), "", "length", 2, 0, 2, logprobs=[-0.5] * OUTPUT)
PAGE, BLOCKS = 4096, 4


def answer(**changes: object) -> Answer:
    return Answer(**({name: getattr(RIGHT, name) for name in Answer.__struct_fields__} | changes))  # type: ignore[arg-type]


def named(name: str) -> Harm:
    return next(harm for harm in HARMS if harm.name == name)


@pytest.fixture(params=[".bin", ".seg"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    """Of vLLM's tier, with a block each; of a well, with several."""
    if request.param == ".bin":
        found = [tmp_path / f"{number}.bin" for number in range(BLOCKS)]
        for path in found:
            path.write_bytes(random.Random(path.name).randbytes(3 * PAGE))
        return found
    found = [tmp_path / f"{number:016x}.seg" for number in range(2)]
    for number, path in enumerate(found):
        path.write_bytes(Image(Maker(2000, sealed=True), number=number).data.tobytes())
    return found


def test_a_bit_of_each_page_is_flipped(files: list[Path]) -> None:
    before = [path.read_bytes() for path in files]
    named("one bit in 4 KiB flipped").damage(files, random.Random(1))
    for path, was in zip(files, before, strict=True):
        changed = np.frombuffer(path.read_bytes(), np.uint8) ^ np.frombuffer(was, np.uint8)
        assert [int(np.bitwise_count(page).sum()) for page in changed.reshape(-1, PAGE)] == [1] * (len(was) // PAGE)


def test_every_block_gets_the_bytes_of_another_one(files: list[Path]) -> None:
    before = [path.read_bytes() for path in files]
    named("swapped").damage(files, random.Random(1))
    after = [path.read_bytes() for path in files]
    assert sorted(map(len, after)) == sorted(map(len, before))
    if files[0].suffix == ".bin":
        assert after == before[1:] + before[:1]
        return
    blocks = len(Image(Maker(2000, sealed=True)).blocks)
    frame = slice(PAGE, (1 + 2 * blocks) * PAGE)  # a page for the header of each, and one for what it holds
    pages = [np.frombuffer(one[frame], np.uint8).reshape(-1, 2 * PAGE) for one in (b"".join(before), b"".join(after))]
    assert not (pages[0] == pages[1]).all(axis=1).any()
    for was, now in zip(before, after, strict=True):
        assert was[: frame.start] == now[: frame.start] and was[frame.stop :] == now[frame.stop :], "only its blocks"


def test_cut_and_deleted_files(files: list[Path]) -> None:
    before = [path.stat().st_size for path in files]
    named("cut to half").damage(files, random.Random(1))
    assert [path.stat().st_size for path in files] == [size // 2 for size in before]
    named("files deleted, ENOSPC on writes").damage(files, random.Random(1))
    assert not any(path.exists() for path in files)


@pytest.mark.parametrize("kind", [FsTier, WellTier])
def test_what_counts_of_an_answer(kind: type[Subject]) -> None:
    seen, harm = Seen(), named("untouched")
    seen.blocks["blocks read"] = 1
    for one in (RIGHT, answer(cached_tokens=0), answer(token_ids=[7] * OUTPUT), answer(finish_reason="error")):
        seen.take(PROMPT, one)
    row = seen.row(kind, harm, 1, "")
    assert (row.cases, row.violations, row.comparison) == (4, 1, not kind.ours)
    assert row.remark.startswith("3 recalled, 1 missed, 1 answered otherwise, 0 failed") and len(row.evidence) == 1
    seen.take(PROMPT, answer(finish_reason="error", token_ids=[]))
    assert seen.row(kind, harm, 1, "").violations == 2


@pytest.mark.parametrize("harm", [harm for harm in HARMS if harm is not HANG], ids=lambda harm: harm.name)
def test_a_harm_that_a_well_did_not_meet_is_no_proof(harm: Harm) -> None:
    seen = Seen()
    seen.take(PROMPT, RIGHT)
    assert seen.row(FsTier, harm, 1, "").violations == 0
    assert seen.row(WellTier, harm, 1, "").violations == 1
    seen.blocks[harm.shown] = seen.struck = 1
    assert seen.row(WellTier, harm, 1, "").violations == 0


def test_what_could_not_be_tried_is_no_case() -> None:
    row = Seen(why="no FUSE").row(WellTier, HARMS[0], 1, "")
    assert (row.cases, row.violations, row.remark) == (0, 0, "not tried: no FUSE")


def test_a_request_that_waits_for_a_hanging_read_is_seen() -> None:
    hung = Hung()
    assert hung.row(WellTier, HANG, 1, "").violations == 1, "no read hung"
    hung.later_s, hung.missed_s = [0.6], [0.4]
    assert hung.row(WellTier, HANG, 1, "").violations == 0
    hung.later_s, hung.missed_s = [0.6, 5.0], [0.4, 0.4]
    ours, theirs = hung.row(WellTier, HANG, 1, ""), hung.row(FsTier, HANG, 1, "")
    assert (ours.cases, ours.violations, ours.comparison) == (2, 1, False)
    assert (theirs.cases, theirs.violations, theirs.comparison) == (2, 1, True)


@pytest.mark.skipif(bool(why_not()), reason=f"no faulty disk: {why_not()}")
def test_vllms_io_on_damaged_files_and_a_failing_disk_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="needs the engine")
    monkeypatch.setattr(module, "HANGS_S", 0.5)
    damaged, fails, hangs = module.rows(replace(Budget(1), scale=0.002), "some version")
    assert all(row.comparison for row in (damaged, fails, hangs))
    assert (damaged.cases, fails.cases, hangs.cases, hangs.violations) == (5, 8, 1, 1)
    assert "cut short: 0 of 1 handed out, 1 refused" in damaged.remark
    for told in (
        "EIO on reads: 0 of 1 handed out, 1 refused",
        "ENOSPC on writes: 0 of 1 handed out, 1 refused, 0 left",
    ):
        assert told in fails.remark
