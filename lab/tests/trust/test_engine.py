"""The engines' campaign as far as it needs no engine: what it takes for wrong, and that its faults take effect."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lab.trust.engine import said
from lab.trust.engine.faults import Fault, kinds
from lab.trust.engine.prompts import LONGEST, OUTPUT, SHORTEST, TAILS, Prompt, draw
from lab.trust.engine.tally import Tally
from lab.trust.engine.well import TestedWell
from stepwell.demo.documents import DemoDocument
from stepwell.demo.wire import Answer
from stepwell.testing.fuse import FaultyDisk, why_not

RIGHT = Prompt((1, 2, 3), tuple(range(OUTPUT)), (-0.5,) * OUTPUT)
ANSWER = Answer(0.1, 0.2, 3, [0, 1, 2], "", "length", 0, 0, 0, logprobs=[-0.5, -0.5, -0.50001])


def test_an_answer_is_right_if_its_tokens_are_and_its_numbers_nearly() -> None:
    assert RIGHT.wrong(ANSWER, 3) == ""
    for changes in (
        {"token_ids": [0, 1, 3]},
        {"token_ids": [0, 1]},
        {"token_ids": [], "finish_reason": "abort"},
        {"logprobs": None},
        {"logprobs": [-0.5, -0.49, -0.5]},
        {"logprobs": [-0.5, None, -0.5]},
    ):
        fields = {name: getattr(ANSWER, name) for name in Answer.__struct_fields__}
        assert RIGHT.wrong(Answer(**(fields | changes)), 3), changes


@pytest.mark.parametrize("written", ["{}", "[{}]", "{0}, 5", "prompt_token_ids: [1, {0}"])
def test_a_prompt_in_a_log_is_found(tmp_path: Path, written: str) -> None:
    prompt = Prompt(tuple(range(100, 120)), (), ())
    (tmp_path / "home").mkdir()
    log = tmp_path / "home" / "some.log"
    log.write_text("nothing of it, and a list of numbers: 100, 101, 102, 103\n")
    assert (said.row(tmp_path, [prompt], 1).cases, said.row(tmp_path, [prompt], 1).violations) == (1, 0)
    log.write_text(written.format(", ".join(map(str, range(114, 120)))))
    assert said.row(tmp_path, [prompt], 1).violations == 1


def test_prompts_of_a_document_begin_alike_and_fit_the_engine() -> None:
    documents = [DemoDocument(str(n), 2000, tuple(range(10_000 * n, 10_000 * n + 2000))) for n in range(4)]
    prompts = draw(documents, random.Random(1), 32)
    assert len(prompts) == len(set(prompts)) == 4 * TAILS
    for number in range(0, len(prompts), TAILS):
        assert len({prompt[:SHORTEST] for prompt in prompts[number : number + TAILS]}) == 1
    assert all(2 * SHORTEST - 32 < len(prompt) < 2 * LONGEST and len(prompt) % 32 > 28 for prompt in prompts)


def test_a_fault_that_was_never_met_is_said_so() -> None:
    tally = Tally()
    tally.answered |= {"no fault": 3, "met": 2, "unmet": 2}
    tally.effects["met"] = 1
    assert tally.remark().endswith("never met: unmet")


@pytest.fixture
def well(tmp_path: Path) -> TestedWell:
    (tmp_path / "disk").mkdir()
    return TestedWell(tmp_path, None, "not asked for")


@pytest.mark.parametrize(
    "name",
    [
        f"segments {how}"
        for how in ("with flipped bytes", "cut short", "swapped", "deleted", "with pieces in wrong places")
    ],
)
def test_faults_of_files_change_them(well: TestedWell, name: str) -> None:
    fault = _named(well, name)
    assert fault.strike(random.Random(1)) == 0, "there are none yet"
    before = {f"{n:08x}.seg": random.Random(n).randbytes(1 << 18) for n in range(8)}
    for file, content in before.items():
        (well.disk / file).write_bytes(content)
    struck = fault.strike(random.Random(1))
    after = {path.name: path.read_bytes() for path in well.disk.iterdir()}
    changed = sum(after.get(file) != content for file, content in before.items())
    assert struck >= changed > 0 and (struck == changed or name.endswith("places"))


def test_without_a_faulty_disk_its_kinds_are_left_out(well: TestedWell) -> None:
    assert not any(fault.name.startswith("disk:") for fault in kinds(well))


@pytest.mark.skipif(bool(why_not()), reason=f"no faulty disk: {why_not()}")
def test_faults_of_the_disk_take_effect_and_end(tmp_path: Path) -> None:
    with FaultyDisk(tmp_path) as disk:
        well = TestedWell(tmp_path / "folder", disk, "")
        file = disk.path / "one.seg"
        file.write_bytes(bytes(1 << 16))
        fault, dice = _named(well, "disk: EIO on reads"), random.Random(1)
        fault.begin(dice)
        with pytest.raises(OSError, match="Input/output"):
            file.read_bytes()
        assert fault.end(dice) >= 1
        assert file.read_bytes() == bytes(1 << 16)


def _named(well: TestedWell, name: str) -> Fault:
    return next(fault for fault in kinds(well) if fault.name == name)
