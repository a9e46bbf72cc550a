"""The harness with a tiny model: references, policies, controls, rows, and what is printed of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from stepwell.cli.commands import app
from stepwell.errors import ConfigError, StepwellError
from stepwell.fidelity import matrix, options, program, tasks
from stepwell.fidelity.matrix import Plan
from stepwell.fidelity.options import Config
from stepwell.fidelity.prefill import LAST_QUERIES, Prefilled, prefill
from stepwell.fidelity.results import report
from stepwell.fidelity.results.metrics import compare
from stepwell.fidelity.results.plots import PlotLine, PlotMark, chart
from stepwell.fidelity.results.rows import FidelityRow
from stepwell.fidelity.runner import Full, Tiered, policy_of
from stepwell.fidelity.tasks import own
from stepwell.longctx import policies
from tests.longctx.tiny_text import VOCABULARY, tiny_text

CONTRACT = [
    *("task", "policy", "tier", "granularity", "budget", "tokens", "digits", "kl_mean", "top1", "field_accuracy"),
    *("full_field_accuracy", "bytes_cold_to_hot", "bytes_all_fp16", "index_bytes", "hot_bytes"),
]
ALL = "stepwell,stepwell:token,full,oracle,recency,random"


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.mul_(8.0 if "q_proj" in name or "k_proj" in name else 4.0)
    return model.eval()


@pytest.fixture(scope="module")
def prefilled(model: Any) -> Prefilled:
    return prefill(model, [tasks.document("kvtable(2)", tiny_text(), 700, 0, number) for number in range(2)])


@pytest.fixture(scope="module")
def rows(model: Any) -> list[FidelityRow]:
    plan = Plan(
        options.configs(ALL), ("kvtable(2)", "nat(8)", "passkey"), (1000,), (0.0625, 0.25), documents=2, seeds=1
    )
    return matrix.run(model, tiny_text(), plan)


def test_the_reference_is_full_attention_over_everything(model: Any, prefilled: Prefilled) -> None:
    for document, logits in zip(prefilled.documents, prefilled.logits, strict=True):
        ids = torch.tensor([document.prompt + document.continuation])
        with torch.no_grad():
            whole = model(ids).logits[0, document.tokens - 1 : -1]
        assert torch.allclose(logits, whole, atol=1e-4)
    assert model.config._attn_implementation == "sdpa"


def test_queries_are_those_of_the_prompts_end(model: Any, prefilled: Prefilled) -> None:
    assert len(prefilled.queries) == 2
    assert {tuple(queries.shape) for queries in prefilled.queries} == {(2, 4, LAST_QUERIES, 16)}
    # Attention of the last query over the first layer's keys is that of eager attention.
    model.set_attn_implementation("eager")
    with torch.no_grad():
        told = model(
            torch.tensor([prefilled.documents[1].prompt[:-1]]), output_attentions=True, past_key_values=DynamicCache()
        )
    model.set_attn_implementation("sdpa")
    keys = prefilled.dense.layers[0].keys[1].repeat_interleave(2, 0)
    logits = torch.einsum("hd,hnd->hn", prefilled.queries[0][1, :, -1], keys) * 16**-0.5
    assert torch.allclose(logits.softmax(-1), told.attentions[0][0, :, -1], atol=1e-4)


def test_prompts_of_different_lengths_are_not_side_by_side(model: Any) -> None:
    with pytest.raises(ValueError, match="one length"):
        prefill(model, [tasks.document("nat(4)", tiny_text(), tokens, 0, 0) for tokens in (300, 301)])


def test_full_attention_step_by_step_is_the_reference(model: Any, prefilled: Prefilled) -> None:
    outcome = Full(model).run(prefilled)
    for document, full, logits in zip(prefilled.documents, prefilled.logits, outcome.logits, strict=True):
        found = compare(document, full, logits)
        assert found.kl.max() < 1e-9 and found.same_top1.all()
    assert outcome.moved.bytes_cold_to_hot == 0
    assert prefilled.dense.get_seq_length() == 699, "nobody changes what all start from"


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_policy_that_fetches_everything_losslessly_is_full_attention(
    model: Any, prefilled: Prefilled, tier: Any, tmp_path: Path
) -> None:
    policy = replace(policy_of(Config("oracle"), 1.0), codec=None)
    outcome = Tiered(model, policy, tier, hot_share=0.2, disk=tmp_path).run(prefilled)
    for document, full, logits in zip(prefilled.documents, prefilled.logits, outcome.logits, strict=True):
        assert compare(document, full, logits).kl.max() < 1e-7
    moved = outcome.moved
    assert moved.selected_share == pytest.approx(moved.fetched_share)
    assert 0.8 < moved.selected_share < 1.0
    # Float32 pages are twice as large as those of fp16.
    assert moved.bytes_cold_to_hot == 2 * moved.bytes_all_fp16
    assert model.config._attn_implementation == "sdpa"


def test_side_by_side_is_as_one_after_the_other(model: Any, prefilled: Prefilled) -> None:
    policy = policy_of(Config("stepwell"), 0.125)
    together = Tiered(model, policy, "host", 0.25).run(prefilled)
    for number, document in enumerate(prefilled.documents):
        alone = Tiered(model, policy, "host", 0.25).run(prefill(model, [document]))
        assert torch.allclose(together.logits[number], alone.logits[0], atol=1e-3)


def test_controls_are_the_policy_but_for_what_they_select() -> None:
    like = replace(policies.named("kvdrive"), page_tokens=8)
    oracle, recency, random = (policy_of(Config(name), 0.1, like) for name in ("oracle", "recency", "random"))
    assert oracle.page_tokens == 1 and not oracle.joint
    for control in (recency, random):
        assert (control.page_tokens, control.codec, control.index) == (8, like.codec, like.index)
    assert {each.residency for each in (oracle, recency, random)} == {None}
    assert policy_of(Config("recency"), 0.1).codec == policies.named("stepwell").codec
    assert policy_of(Config("stepwell", 32), 0.1).page_tokens == 32


def test_blind_controls_have_the_newest_tokens_where_the_policy_keeps_what_it_fetched(
    model: Any, prefilled: Prefilled
) -> None:
    keeps, forgets = policies.named("stepwell"), policies.named("yakv")
    assert (policy_of(Config("recency"), 0.1, keeps).window, policy_of(Config("random"), 0.1, forgets).window) == (
        None,
        64,
    )
    assert policy_of(Config("oracle"), 0.1, keeps).window == 64
    policy, control = (
        Tiered(model, policy_of(Config(name), 0.1), "host", 0.5).run(prefilled).moved
        for name in ("stepwell", "recency")
    )
    assert control.hot_bytes == pytest.approx(policy.hot_bytes, rel=0.1)


def test_an_exact_policy_is_run_once_and_is_no_model_for_controls(model: Any) -> None:
    names = "exact,verified,recency,stepwell"
    plan = Plan(options.configs(names), ("nat(4)",), (600,), (0.1, 0.2), documents=1, seeds=1)
    found = {(row.policy, row.budget): row for row in matrix.run(model, tiny_text(), plan)}
    assert found.keys() == {("exact", 1.0), ("verified", 1.0)} | {
        (name, of) for name in ("stepwell", "recency") for of in (0.1, 0.2)
    }
    assert found["exact", 1.0].kl_mean < 1e-7 < found["recency", 0.1].kl_mean


def test_a_budget_bounds_what_is_selected() -> None:
    for name in ("stepwell", "yakv", "scout"):
        selector: Any = policy_of(Config(name), 0.01).selector
        assert getattr(selector, "share", None) == 0.01 or selector.ceiling == 0.01


def test_rows_are_complete_and_begin_as_promised(rows: list[FidelityRow]) -> None:
    assert list(FidelityRow.__dataclass_fields__)[: len(CONTRACT)] == CONTRACT
    for task in ("kvtable", "nat", "passkey"):
        found = [(row.policy, row.granularity, row.budget) for row in rows if row.task == task]
        assert found.count(("full", "token", 1.0)) == 1
        sparse = {(policy, of) for policy, of, _ in found} - {("full", "token")}
        assert sparse == {("stepwell", "page 16"), ("stepwell", "token"), ("oracle", "token"), ("recency", "page 16"),
                          ("random", "page 16")}  # fmt: skip
        assert len(found) == 1 + 2 * len(sparse)
    assert {row.digits for row in rows if row.task == "kvtable"} == {20}
    assert {(row.digits, row.steps) for row in rows if row.task == "nat"} == {(0, 16)}
    assert {row.blind for row in rows if row.task == "passkey"} == {True}
    assert all(0 <= row.kl_mean <= row.kl_max and row.kl_mean_ci[0] <= row.kl_mean <= row.kl_mean_ci[1] for row in rows)
    assert all(row.full_field_accuracy == row.field_accuracy for row in rows if row.policy == "full")


def test_blind_controls_move_what_the_policy_moved(rows: list[FidelityRow]) -> None:
    by_point = {(row.task, row.policy, row.granularity, row.budget): row for row in rows}
    for budget in (0.0625, 0.25):
        policy = by_point["kvtable", "stepwell", "page 16", budget]
        for name in ("recency", "random"):
            control = by_point["kvtable", name, "page 16", budget]
            page = 1 / 1000 * 16
            assert abs(control.fetched_share - policy.fetched_share) <= max(page, 0.1 * policy.fetched_share)
            assert control.hit_rate == 0


def test_a_run_that_has_no_time_left_ends_with_what_it_has(model: Any) -> None:
    said: list[str] = []
    plan = Plan(options.configs("full"), ("nat(2)",), (300,), documents=1, seeds=4, limit_s=0.001)
    [row] = matrix.run(model, tiny_text(), plan, said.append)
    assert row.documents == 1 and "stopped" in said[-1]


def test_own_documents_have_rows_of_their_own(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    lines = [{"prompt": "x" * (200 + n), "gold": {"a": "1"}, "task": "mine"} for n in range(2)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    plan = Plan(options.configs("full,stepwell"), own=own.read(path, tiny_text()))
    found = matrix.run(model, tiny_text(), plan)
    assert [(row.task, row.policy, row.documents, row.tokens) for row in found] == [
        ("mine", "full", 2, 200), ("mine", "stepwell", 2, 200),
    ]  # fmt: skip


# --- what is printed -------------------------------------------------------------------------


class Tags(HTMLParser):
    """Fails for tags that do not close, and for anything that would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in {"script", "link", "img", "iframe"}
        assert not {"src", "href"} & dict(attrs).keys()
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in {"line", "polyline", "circle"}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_is_one_file_that_names_every_policy(rows: list[FidelityRow]) -> None:
    about = report.RunFacts("tiny <model>", {"cpu": "a & b"})
    page = report.html(rows, about)
    parser = Tags()
    parser.feed(page)
    assert parser.open == []
    for row in rows:
        assert page.count(row.policy) >= 3
    assert "tiny &lt;model&gt;" in page and "a &amp; b" in page
    assert page.count(report.BLIND) == 1
    text = report.table(rows, about)
    assert all(row.policy in text and f"{row.task}, " in text for row in rows)
    assert max(map(len, text.splitlines())) <= 120


def test_charts_are_xml_with_a_mark_for_each_point() -> None:
    lines = [
        PlotLine("full", [PlotMark(0, 0.9, 0.9, 0.9)], level=True),
        PlotLine("a & b", [PlotMark(0.05, 0.8, 0.7, 0.85), PlotMark(0.2, 0.88, 0.8, 0.95)]),
        PlotLine("nothing moved", [PlotMark(0, 0.5, 0.4, 0.6)]),
    ]
    drawn = ElementTree.fromstring(chart("t <x>", "bytes", "quality", lines))
    space = "{http://www.w3.org/2000/svg}"
    circles = drawn.findall(f"{space}circle")
    assert len(circles) == 2
    left, right = (float(circle.attrib["cx"]) for circle in circles)
    lower, upper = (float(circle.attrib["cy"]) for circle in circles)
    assert left < right and upper < lower, "y grows downwards in SVG"
    titles = [title.text for title in drawn.iter(f"{space}title")]
    assert titles[0] == "full: 0.9" and titles[1].startswith("a & b: 0.8 (0.7 to 0.85)")


def test_too_few_facts_for_a_point_are_called_so(rows: list[FidelityRow]) -> None:
    about = report.RunFacts("a model", {})
    few = next(row for row in rows if row.digits)
    for shown in (report.table, report.html):
        assert "too few to judge a point by" in shown([few], about)
        assert "too few" not in shown([replace(few, digits=1000)], about)
        assert "every next token counts" in shown([replace(few, digits=0)], about)


@pytest.mark.parametrize(("length", "told"), [(600, False), (80, True)])
def test_a_prompt_of_which_nothing_is_cold_is_told_of(model: Any, length: int, told: bool) -> None:
    said: list[str] = []
    plan = Plan(options.configs("stepwell"), ("nat(4)",), (length,), (0.25,), documents=1, seeds=1)
    matrix.run(model, tiny_text(), plan, said.append)
    assert any("nothing was cold" in line for line in said) is told


@pytest.fixture
def small(model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[CliRunner]:
    """The command with the tiny model in the place of a folder's."""
    monkeypatch.setattr(program, "prepare", lambda folder, progress: Path("tiny"))
    monkeypatch.setattr(program, "_loaded", lambda folder: model)
    monkeypatch.setattr(program.Text, "of_model", classmethod(lambda cls, folder: tiny_text()))
    yield CliRunner()


SMALL = ["fidelity", "--tasks-named", "kvtable(2)", "--lengths", "600", "--documents", "1", "--seeds", "1",
         "--budgets", "25%"]  # fmt: skip


def test_json_is_one_line_and_nothing_else(small: CliRunner, tmp_path: Path) -> None:
    out, html = tmp_path / "rows.json", tmp_path / "report.html"
    done = small.invoke(app, [*SMALL, "--json", "--out", str(out), "--html", str(html)])
    assert done.exit_code == 0, done.output
    assert done.stdout.count("\n") == 1
    told = json.loads(done.stdout)
    assert list(told) == ["rows"]
    assert [row["policy"] for row in told["rows"]] == ["full", "stepwell", "oracle", "recency", "random"]
    assert list(told["rows"][0])[: len(CONTRACT)] == CONTRACT
    assert all(value is not None for row in told["rows"] for name, value in row.items() if name in CONTRACT)
    kept = msgspec.json.decode(out.read_bytes())
    assert kept["rows"] == told["rows"] and kept["model"] == "tiny" and "cpu" in kept["machine"]
    assert html.read_text().startswith("<!doctype html>")
    assert "prefilled in" in done.stderr


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--policies", "none-such"], "SW-131"),
        (["--policies", "a b"], "SW-128"),
        (["--policies", ","], "SW-128"),
        (["--policies", "stepwell:page0"], "SW-128"),
        (["--budgets", "0"], "SW-128"),
        (["--budgets", "101%"], "SW-128"),
        (["--lengths", "10"], "SW-128"),
        (["--lengths", "many"], "SW-128"),
        (["--tasks-named", "none"], "SW-128"),
        (["--hot", "2"], "SW-128"),
        (["--tier", "tape"], "SW-128"),
        (["--tasks", "none.jsonl"], "SW-128"),
        (["--html", "/no/such/folder/report.html"], "SW-123"),
    ],
)
def test_what_cannot_be_is_told_before_anything_runs(small: CliRunner, options: list[str], code: str) -> None:
    done = small.invoke(app, [*SMALL, *options])
    assert isinstance(done.exception, StepwellError) and done.exception.code == code
    assert isinstance(done.exception, ConfigError)
    assert "prefilled" not in done.stderr


def test_lengths_and_budgets_may_be_written_in_two_ways() -> None:
    assert options.lengths("1K, 2048,8k") == [1024, 2048, 8192]
    assert options.shares("6.25%,0.125", "--budgets") == [0.0625, 0.125]
    assert options.configs("a:token,b:page32,c") == [Config("a", 1), Config("b", 32), Config("c")]


def test_kept_rows_say_how_to_make_them_again() -> None:
    wanted = program.FidelityRequest(
        model=Path("/a/b/model"), policies="stepwell,full", tasks="kvtable(3)", seeds=1, audit=True
    )
    assert program.command(wanted) == (
        "stepwell fidelity --model model --policies stepwell,full --tasks-named 'kvtable(3)' --seeds 1 --audit"
    )
    assert program.command(program.FidelityRequest(quick=True)) == "stepwell fidelity --quick"
