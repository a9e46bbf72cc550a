"""Nouns of identity: chain, names, sizes, and the table of states. Golden values guard what lies on other disks."""

from __future__ import annotations

import itertools
import random

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from stepwell.block.digest import RECIPE, ROOT, Chain, pack_tokens, salt_extras
from stepwell.block.facts import lp
from stepwell.block.layout import (
    MAX_DEFAULT_SHARD,
    MIN_BLOCK_TOKENS,
    MIN_SHARD,
    PAGE,
    GiB,
    MiB,
    SlabLayout,
    block_tokens_for,
)
from stepwell.block.namespace import Namer, Namespace, layout_of_session
from stepwell.block.state import LEGAL, BlockState, IllegalChange, StateEvent, after

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=80)


# the chain -----------------------------------------------------------------------------------------------------------


def _digests(tokens: list[int], size: int, extras: bytes = b"") -> list[bytes]:
    """The recipe, written once more."""
    made, parent = [], ROOT
    for at in range(0, len(tokens) - size + 1, size):
        packed = b"".join(t.to_bytes(4, "little") for t in tokens[at : at + size])
        parent = blake3(b"stepwell digest 1" + parent + packed + lp(extras if at == 0 else b"")).digest()
        made.append(parent)
    return made


@given(TOKENS, st.integers(1, 9), st.lists(st.integers(0, 80), max_size=5), st.binary(max_size=8))
def test_a_chain_is_the_same_however_its_tokens_arrive(
    tokens: list[int], size: int, cuts: list[int], extras: bytes
) -> None:
    chain = Chain(size, extras)
    ends = [0, *sorted(min(c, len(tokens)) for c in cuts), len(tokens)]
    for a, b in itertools.pairwise(ends):
        chain.extend(tokens[a:b])
    assert chain.digests == b"".join(_digests(tokens, size, extras))
    assert len(chain) == len(tokens) // size
    assert chain.tokens == len(tokens)


@given(TOKENS, st.integers(1, 4), st.data())
def test_one_other_token_changes_its_block_and_all_that_follow(
    tokens: list[int], size: int, data: st.DataObject
) -> None:
    full = len(tokens) // size * size
    if not full:
        return
    at = data.draw(st.integers(0, full - 1))
    other = list(tokens)
    other[at] = data.draw(st.integers(0, 2**32 - 1).filter(lambda t: t != tokens[at]))
    for n, (a, b) in enumerate(zip(_chain(tokens, size), _chain(other, size), strict=True)):
        assert (a == b) is (n < at // size)


def _chain(tokens: list[int], size: int, extras: bytes = b"") -> list[bytes]:
    chain = Chain(size, extras)
    chain.extend(tokens)
    return [chain.digests[i : i + 32] for i in range(0, len(chain.digests), 32)]


@given(st.none() | st.text(max_size=6), st.none() | st.text(max_size=6))
def test_salts_separate_from_the_first_block_on(one: str | None, two: str | None) -> None:
    a, b = (_chain(list(range(8)), 4, salt_extras(salt)) for salt in (one, two))
    assert [x == y for x, y in zip(a, b, strict=True)] == [one == two] * 2


def test_a_salt_may_be_any_text_that_json_can_carry() -> None:
    assert salt_extras("\ud800") != salt_extras("\ud801") != salt_extras("")
    assert salt_extras("") != salt_extras(None) == b""


def test_the_recipe_is_golden() -> None:
    chain = Chain(4, salt_extras("pepper"))
    chain.extend(range(9))
    assert chain.digests.hex() == GOLDEN_CHAIN
    assert RECIPE == b"stepwell digest 1"  # whoever changes the recipe changes its name


GOLDEN_CHAIN = (
    "31fec36efbb4d2e6c3361af0710f9d7920611bfe4fa3c5dd47505c2b3e81c061"
    "09995934f69bd6a31bc751b53157365943b75a94eba9a6d9533b56079394cf9c"
)


def test_recipes_separate(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _chain(list(range(8)), 4)
    monkeypatch.setattr("stepwell.block.digest.RECIPE", b"stepwell digest 2")
    assert not set(before) & set(_chain(list(range(8)), 4))


@pytest.mark.parametrize("token", [-1, 2**32])
def test_impossible_tokens(token: int) -> None:
    chain = Chain(2)
    chain.extend([1])
    with pytest.raises(OverflowError):
        chain.extend([2, token])
    assert (chain.tokens, chain.digests) == (1, b"")
    assert pack_tokens([1, 2**32 - 1]) == b"\x01\0\0\0\xff\xff\xff\xff"


# names ---------------------------------------------------------------------------------------------------------------

NAMESPACES = st.builds(
    Namespace,
    weights=st.binary(max_size=3),
    model=st.binary(max_size=3),
    layout=st.binary(max_size=3),
    block_tokens=st.integers(0, 3),
    epoch=st.sampled_from([0, 1, 2**64 - 1]),
)


@given(NAMESPACES, NAMESPACES)
def test_namespaces_encode_injectively(one: Namespace, two: Namespace) -> None:
    assert (one.encode() == two.encode()) is (one == two)


@given(st.binary(max_size=6), st.binary(max_size=6), st.binary(max_size=6))
def test_bytes_cannot_move_from_one_field_to_the_next(a: bytes, b: bytes, c: bytes) -> None:
    joined = a + b + c
    splits = {
        Namespace(joined[:i], joined[i:j], joined[j:], 1).encode()
        for i in range(len(joined) + 1)
        for j in range(i, len(joined) + 1)
    }
    assert len(splits) == (len(joined) + 1) * (len(joined) + 2) // 2


KEY, WEIGHTS, MODEL, LAYOUT = (bytes([n]) * 32 for n in range(1, 5))
PLAIN = Namespace(WEIGHTS, MODEL, LAYOUT, 128)
OTHERS = {
    "weights": Namespace(bytes(32), MODEL, LAYOUT, 128),
    "model": Namespace(WEIGHTS, bytes(32), LAYOUT, 128),
    "layout": Namespace(WEIGHTS, MODEL, bytes(32), 128),
    "block_tokens": Namespace(WEIGHTS, MODEL, LAYOUT, 256),
    "epoch": PLAIN.at_epoch(1),
}


@pytest.mark.parametrize("field", OTHERS)
def test_each_field_of_a_namespace_gives_other_names(field: str) -> None:
    assert Namer(KEY, PLAIN).name(ROOT) != Namer(KEY, OTHERS[field]).name(ROOT)


def test_names_are_keyed() -> None:
    namer = Namer(KEY, PLAIN)
    assert namer.name(ROOT) == namer.name(ROOT) == Namer(KEY, PLAIN).name(ROOT)
    assert namer.name(ROOT) != Namer(bytes(32), PLAIN).name(ROOT)
    assert namer.name(ROOT) == blake3(lp(PLAIN.encode()) + ROOT, key=KEY).digest()
    assert namer.name(ROOT).hex() == GOLDEN_NAME


GOLDEN_NAME = "ad678775f843c37db25c78f1b65865fb655e36fbf1e112d7a80bf020e68ab397"


def test_every_member_of_a_session_counts_in_its_layout() -> None:
    made = {
        layout_of_session(s, w, n)
        for s in (WEIGHTS, MODEL)
        for w in ([LAYOUT], [KEY], [LAYOUT, KEY], [KEY, LAYOUT], [LAYOUT, LAYOUT])
        for n in (4096, 8192)
    }
    assert len(made) == 2 * 5 * 2
    assert layout_of_session(b"ab", [b"c"], 1) != layout_of_session(b"a", [b"bc"], 1)


# sizes ---------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 512), st.integers(1, 64 * MiB))
def test_block_tokens(page: int, shard: int) -> None:
    tokens = block_tokens_for(page, shard)
    pages = tokens // page
    assert tokens == page * pages and pages.bit_count() == 1
    assert pages * shard >= MIN_SHARD
    assert tokens >= MIN_BLOCK_TOKENS or 2 * pages * shard > MAX_DEFAULT_SHARD
    assert pages == 1 or pages // 2 * shard < MIN_SHARD or tokens // 2 < MIN_BLOCK_TOKENS
    assert pages == 1 or pages // 2 * shard < MIN_SHARD or pages * shard <= MAX_DEFAULT_SHARD


@pytest.mark.parametrize(
    ("page", "token_bytes", "tokens"),
    [(16, 128 << 10, 128), (16, 40 << 10, 128), (256, 23 << 10, 256), (16, 1 << 20, 32), (16, 3 << 20, 16)],
    ids=["8B", "70B on 8 ranks", "large pages", "1 MiB a token", "3 MiB a token"],
)
def test_block_tokens_of_models(page: int, token_bytes: int, tokens: int) -> None:
    assert block_tokens_for(page, page * token_bytes) == tokens


@given(st.integers(1, 1 << 44), st.integers(1, GiB))
def test_slab_layouts(host: int, slot: int) -> None:
    layout = SlabLayout.within(host, slot)
    assert layout.nbytes <= host or not layout.slots
    if not layout.slots:
        assert SlabLayout(slot, 1).nbytes > host
        return
    eight = SlabLayout(slot, 8).nbytes
    assert layout.nbytes <= max(GiB, eight)
    assert layout.slots >= 8 or SlabLayout(slot, layout.slots + 1).nbytes > host
    # As large as its target allows: one more slot would be over it.
    assert SlabLayout(slot, layout.slots + 1).nbytes > min(max(host // 16, eight, 16 * MiB), max(GiB, eight), host)
    # 0 ── words ── offset ── slots of `stride` ── nbytes, all on pages, nothing overlapping
    assert 8 * layout.slots <= layout.offset
    assert layout.slot_bytes <= layout.stride
    assert layout.offset % PAGE == layout.stride % PAGE == 0
    assert layout.offset + layout.slots * layout.stride == layout.nbytes


# states --------------------------------------------------------------------------------------------------------------


def test_the_table_is_all_there_is() -> None:
    seen = set()
    for state, event in itertools.product(BlockState, StateEvent):
        if (state, event) in LEGAL:
            assert after(state, event) is LEGAL[state, event]
            seen.add(LEGAL[state, event])
        else:
            with pytest.raises(IllegalChange):
                after(state, event)
    assert seen == set(BlockState)


def test_a_replay_keeps_to_what_the_states_mean() -> None:
    """Readable only between LAND and DRAIN or GONE, and every way ends in ABSENT."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    for _ in range(200):
        state, landed, readable = BlockState.ABSENT, False, False
        for _ in range(20):
            event = draw.choice([e for s, e in LEGAL if s is state])
            state = after(state, event)
            landed = event is StateEvent.LAND or (landed and event is not StateEvent.FILL)
            readable = event is StateEvent.LAND
            assert (state is BlockState.RESIDENT) is readable
            assert state is not BlockState.DRAINING or landed
        while state is not BlockState.ABSENT:
            state = after(state, next(e for s, e in LEGAL if s is state and e in (StateEvent.FAIL, StateEvent.GONE)))
