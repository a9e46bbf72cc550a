"""Decoding across tiers on a device: exact attention is full attention's, and what is selected is what was injected."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from lab.bench.longctx.gpu import run as gpu
from lab.bench.longctx.gpu.injected import Trace
from lab.bench.longctx.stage import Stage
from stepwell.longctx import AttentionMode, Policy, TieredCache, attach, policies
from stepwell.longctx.kv.cold import ColdPages
from stepwell.longctx.kv.fetch.arrival import arrive, timing
from stepwell.longctx.kv.fetch.fetcher import Fetcher
from stepwell.longctx.kv.fetch.page_fetch import PageFetch
from stepwell.longctx.ledger import Ledger
from stepwell.longctx.parts.codec.plain import Plain
from stepwell.longctx.parts.index.exact import TrueKeys
from stepwell.longctx.parts.select.topk import TopK
from stepwell.longctx.shape import PageShape
from stepwell.longctx.store.host import HostPool
from stepwell.longctx.store.link import ModelledLink

EXACT = Policy("exact-small", AttentionMode.EXACT, page_tokens=8, sinks=4, window=16, draft_tokens=4)


def _model(device: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**gpu.SHAPES["tiny"], max_position_embeddings=4096)
    return LlamaForCausalLM(config).eval().to(device)


@torch.no_grad()
@pytest.mark.parametrize("name", ["exact", "everything selected", "in place"])
def test_decoding_over_cold_pages_is_full_attention(device: str, name: str) -> None:
    model = _model(device)
    ids = torch.randint(1, 512, (1, 400), generator=torch.Generator().manual_seed(1)).to(device)
    expected = model(ids).logits[0, -9:]
    every = replace(
        policies.STEPWELL, page_tokens=8, window=16, draft_tokens=4, selector=TopK(1.0), codec=None, late_mass=None
    )
    in_place = replace(every, executor="in_place", prefetch=False)
    policy = {"exact": EXACT, "everything selected": every, "in place": in_place}[name]
    cache = TieredCache(model.config, policy, hot_tokens=96, host="64MiB", link=ModelledLink(1e15))
    with attach(model, policy, hot_tokens=96):
        found = [model(ids[:, :-8], past_key_values=cache).logits[:, -1]]
        found += [model(ids[:, at : at + 1], past_key_values=cache).logits[:, -1] for at in range(392, 400)]
    assert cache.ledger.cold_to_hot() > 0
    cache.close()
    assert (torch.cat(found) - expected).abs().max() < 1e-3 * expected.abs().max()


@torch.no_grad()
def test_a_decode_of_an_adopted_context_moves_what_the_trace_says(device: str) -> None:
    model = _model(device)
    found = gpu.decode(model, "stepwell", 1024, 6, Stage.begin(True, None, 60.0))
    assert len(found.seconds) == 6 and found.fetch > 0 and 0.0 <= found.hidden <= 1.0
    page = 16 * 2 * 2 * 32  # numbers in K and V
    layers, selected = 4, round(gpu.SHARE * 1024 / 16)
    assert 0 < found.nbytes / 6 < layers * selected * page * 1.5, "less than all that is selected, at 8 and 4 bits"


def test_traces_change_by_the_share_that_they_say() -> None:
    shape = PageShape(heads=1, group=1, tokens=4, key_dim=8, value_dim=8)
    trace = Trace(TrueKeys(), share=0.25, fresh=0.5, wrong=0.25, foretold_from=1)
    first, second = trace.build(shape), trace.build(shape)
    chosen: list[set[int]] = []
    for index in (first, second):
        index.add(torch.randn(1, 1, 64 * 4, 8))
    query = torch.randn(1, 1, 1, 8)

    def pages(index: Any) -> set[int]:
        by_page = index.score(query).unflatten(-1, (64, 4)).amax(-1).flatten()
        return set(by_page.topk(16).indices.tolist())

    for step in range(3):
        trace.step = step
        chosen.append(pages(first))
        assert pages(first) == chosen[-1], "not foretold: the same however often it is asked for"
        foretold, actual = pages(second), pages(second)
        assert len(foretold & actual) == 12, "a quarter is wrong"
        assert pages(second) == actual
    assert [len(a & b) for a, b in pairwise(chosen)] == [8, 8]


def test_what_arrives_is_there_for_who_asks(device: str) -> None:
    at, shape = torch.device(device), PageShape(heads=2, group=1, tokens=16, key_dim=64, value_dim=64)
    fetcher = Fetcher(Ledger(), beside=True)
    codec = Plain().build(shape, torch.float32)
    source = ColdPages(codec, HostPool(codec.page_bytes, 64 << 20, pinned=True), 1, device=at, fetcher=fetcher)
    keys, values = torch.randn(2, 1, 256, 2, 16, 64).unbind()
    source.add(keys.to(at), values.to(at))
    pages = torch.randperm(256)
    with timing() as waited:
        for _ in range(8):  # so that memory of earlier ones is used anew
            found = fetcher.start(partial(arrive, source, torch.zeros_like(pages), pages)).result().states()
            assert all(
                torch.equal(each.cpu(), kept[0, pages]) for each, kept in zip(found, (keys, values), strict=True)
            )
    assert (waited() > 0) == (device == "cuda")
    fetcher.close()


def test_what_is_to_be_read_is_known_on_the_host(device: str) -> None:
    """The stream on which pages come does not wait for the model's, which finds out which ones they are."""

    where: list[str] = []

    class Asked(ColdPages):
        def read(self, lanes: torch.Tensor, pages: torch.Tensor, device: torch.device | None = None) -> Any:
            where.extend([lanes.device.type, pages.device.type])
            return super().read(lanes, pages, device)

    shape = PageShape(heads=2, group=1, tokens=16, key_dim=8, value_dim=8)
    ledger, codec = Ledger(), Plain().build(shape, torch.float32)
    fetcher, store = Fetcher(ledger, beside=True), HostPool(codec.page_bytes, 1 << 20, pinned=True)
    source = Asked(codec, store, 1, device=torch.device(device), fetcher=fetcher)
    source.add(*torch.randn(2, 1, 8, 2, 16, 8).unbind())
    wanted = torch.ones(1, 8, dtype=torch.bool, device=device)
    brought = PageFetch(source, wanted, 3, fetcher=fetcher, ledger=ledger, kind="draft")
    found = [(piece.lanes.device.type, piece.states.result().states()[0].device.type) for piece in brought.pieces()]
    fetcher.close()
    assert found == [(device, device)] * 3 and where == ["cpu"] * 6
