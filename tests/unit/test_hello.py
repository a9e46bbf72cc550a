"""What a hello says beside digests: cache groups, facts and flags; what a well keeps of it, and who is told."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import msgspec
import pytest
from deep import chain

from lab.rig.members import FakeEngine, FakeMember, Model, Rig
from stepwell.block.facts import MAX_FACTS, differences, facts_of, facts_text
from stepwell.cli.cache import differing as differing_rows
from stepwell.cli.cache import identities
from stepwell.errors import ProtocolError
from stepwell.hierarchy.requests.clearing import NamespaceSum
from stepwell.hierarchy.sessions.known import MAX_DIFFERENT, MAX_TENANT_BYTES, MAX_TENANT_NAMESPACES
from stepwell.protocol import messages as m
from stepwell.protocol import wire
from stepwell.testing.arena_kit import SLAB, SLOT
from stepwell.vault.keyring import Keyring

MODEL = Model()
BF16 = m.CacheGroup("full", 32, 8, 128, "bfloat16", 128, SLOT)


class Engine(FakeEngine):
    """Says facts, and groups."""

    def __init__(
        self,
        rig: Rig,
        facts: Mapping[str, str] = {},
        groups: Sequence[m.CacheGroup] = (),
        *,
        model: Model = MODEL,
        name: str = "engine",
        tenant: str = "default",
        ranks: Mapping[int, Mapping[str, str]] = {},
    ) -> None:
        self._facts, self._groups, self._ranks = facts, groups, ranks
        super().__init__(rig, model, name=name, tenant=tenant)
        rig.settle()

    def scheduler_hello(self, protocol: int = m.PROTOCOL) -> m.Hello:
        return msgspec.structs.replace(
            super().scheduler_hello(protocol), facts=facts_text(self._facts), groups=list(self._groups), label=self.name
        )

    def worker_hello(self, rank: int, acknowledges: Sequence[int] = ()) -> m.Hello:
        return msgspec.structs.replace(
            super().worker_hello(rank, acknowledges), facts=facts_text(self._ranks.get(rank, {}))
        )


def namespaces(rig: Rig) -> dict[bytes, NamespaceSum]:
    told: list[dict[bytes, NamespaceSum]] = []
    rig.hierarchy.operator.count_namespaces(told.append)
    rig.settle()
    return told[0]


def differing(rig: Rig, name: str) -> list[tuple[str, str, str]]:
    (of,) = (of for of in namespaces(rig).values() if name in of.engines)
    return of.differs


# who is served -------------------------------------------------------------------------------------------------------


class Before(FakeEngine):
    """Speaks protocol 4: its hellos end with `replicas`."""

    def scheduler_hello(self, protocol: int = m.OLDEST_PROTOCOL) -> m.Hello:
        return self._before(super().scheduler_hello(protocol))

    def worker_hello(self, rank: int, acknowledges: Sequence[int] = ()) -> m.Hello:
        return self._before(super().worker_hello(rank, acknowledges))

    @staticmethod
    def _before(hello: m.Hello) -> m.Hello:
        said = msgspec.msgpack.decode(msgspec.msgpack.encode(hello))[:16]
        return msgspec.msgpack.decode(msgspec.msgpack.encode([said[0], 4, *said[2:]]), type=m.Hello)


def test_an_engine_of_protocol_4_shares_blocks_with_one_of_protocol_5() -> None:
    rig = Rig(8 * SLAB, seed=1)
    model = Model(world=4, replicas=2, pins=True)
    before = Before(rig, model)
    rig.settle()
    assert before.scheduler.member is not None and before.scheduler.member.hello.protocol == 4 == m.OLDEST_PROTOCOL
    assert before.workers[1].member is not None and before.workers[1].member.hello.pins
    assert before.spill(chain(2)) == 2
    now = Engine(rig, {"engine": "vllm 0.32"}, [BF16], model=model, name="now")
    assert now.found(chain(2)) == 2


def test_what_a_later_version_adds_to_a_hello_is_ignored() -> None:
    rig = Rig(8 * SLAB, seed=1)
    engine = Engine(rig)
    hello = msgspec.structs.replace(engine.scheduler_hello(), flags=["teleports", "x" * 64], engine="other")
    said = [*msgspec.msgpack.decode(msgspec.msgpack.encode(hello)), "and more"]
    FakeMember(rig, msgspec.structs.replace(engine.worker_hello(0), engine="other"))
    member = FakeMember(rig, wire.from_engine.decode(msgspec.msgpack.encode(said)))  # type: ignore[arg-type]
    rig.settle()
    assert not member.gone and member.take(m.Ready)


@pytest.mark.parametrize(
    "change",
    [
        {"facts": bytes(MAX_FACTS + 1)},
        {"flags": ["f"] * (m.MAX_FLAGS + 1)},
        {"groups": [msgspec.structs.replace(BF16, shard_bytes=0)] * (m.MAX_GROUPS + 1)},
    ],
    ids=["facts", "flags", "groups"],
)
def test_a_hello_that_says_too_much_is_refused_by_the_decoder_and_by_the_well(change: dict[str, object]) -> None:
    rig = Rig(8 * SLAB, seed=1)
    hello = msgspec.structs.replace(FakeEngine(rig).scheduler_hello(), engine="other", **change)
    with pytest.raises(ProtocolError) as refused:
        list(wire.Reader(wire.from_engine).feed(wire.frame(hello)))
    assert refused.value.code == "SW-803" and "of length <= " in refused.value.why
    member = FakeMember(rig, hello)
    (answer,) = member.take(m.Refused)
    assert member.gone and answer.code == "SW-804" and str(MAX_FACTS) in answer.why


@pytest.mark.parametrize(
    "groups",
    [
        [msgspec.structs.replace(BF16, shard_bytes=SLOT - 1)],
        [BF16, msgspec.structs.replace(BF16, shard_bytes=SLOT // 2)],
        [msgspec.structs.replace(BF16, layers=-1)],
        [msgspec.structs.replace(BF16, shard_bytes=2 * SLOT), msgspec.structs.replace(BF16, shard_bytes=-SLOT)],
    ],
)
def test_groups_that_do_not_make_up_the_shard_are_refused(groups: list[m.CacheGroup]) -> None:
    rig = Rig(8 * SLAB, seed=1)
    member = FakeMember(rig, msgspec.structs.replace(FakeEngine(rig).scheduler_hello(), engine="other", groups=groups))
    assert [refused.code for refused in member.take(m.Refused)] == ["SW-804"]


# what differs --------------------------------------------------------------------------------------------------------


def test_the_field_that_keeps_an_engine_from_stored_blocks_is_named_after_their_engine_has_gone() -> None:
    rig = Rig(8 * SLAB, seed=1)
    first = Engine(rig, {"engine": "vllm 0.32"}, [BF16])
    assert first.spill(chain(3)) == 3
    first.scheduler.leave()
    rig.settle()
    half = msgspec.structs.replace(BF16, dtype="float16")
    second = Engine(rig, {"engine": "vllm 0.32"}, [half], model=Model(model=b"n" * 32), name="second")
    assert second.found(chain(3)) == 0
    assert differing(rig, "second") == [("group.0.dtype", "float16", "bfloat16")]
    rows = [
        m.NamespaceRow(tag, of.tenant, sorted(of.engines), of.blocks, of.nbytes, False, of.nearest, of.differs)
        for tag, of in namespaces(rig).items()
    ]
    (line,) = identities(rows)
    assert line.startswith("second finds nothing in ") and line.endswith(
        "which holds 3 blocks: group.0.dtype: float16 here, bfloat16 there"
    )
    (shown,) = differing_rows(rows)
    assert shown["engines"] == ["second"] and shown["blocks"] == 3 and shown["nearest"] in line
    assert shown["differs"] == [("group.0.dtype", "float16", "bfloat16")]


def test_what_workers_and_digests_say_is_compared_too() -> None:
    rig = Rig(8 * SLAB, seed=1)
    first = Engine(rig, model=Model(world=2), ranks={0: {"page.0.k": "[2,8]"}, 1: {"page.0.k": "[9,9]"}})
    assert first.spill(chain(1)) == 1
    other = Model(weights=b"v" * 32, layout=b"k" * 32, world=2)
    Engine(rig, model=other, ranks={0: {"page.0.k": "[8,2]"}, 1: {"page.0.k": "[9,9]"}}, name="other")
    assert differing(rig, "other") == [
        ("page.0.k", "[8,2]", "[2,8]"),
        ("weights", b"v".hex() * 8, b"w".hex() * 8),
    ]


def test_models_that_have_little_in_common_are_not_compared() -> None:
    rig = Rig(8 * SLAB, seed=1)
    assert Engine(rig, {chr(97 + n): "a" for n in range(MAX_DIFFERENT)}).spill(chain(1)) == 1
    Engine(rig, {chr(97 + n): "b" for n in range(MAX_DIFFERENT)}, model=Model(model=b"n" * 32), name="near")
    Engine(rig, {chr(97 + n): "b" for n in range(MAX_DIFFERENT + 1)}, model=Model(model=b"o" * 32), name="far")
    assert len(differing(rig, "near")) == MAX_DIFFERENT and differing(rig, "far") == []


def test_no_tenant_is_compared_with_another() -> None:
    rig = Rig(8 * SLAB, seed=1, keyring=Keyring.ephemeral(("default", "a", "b")))
    assert Engine(rig, {"kv.dtype": "auto"}, tenant="a").spill(chain(2)) == 2
    other = Model(model=b"n" * 32)
    Engine(rig, {"kv.dtype": "fp8"}, model=other, name="stranger", tenant="b")
    assert differing(rig, "stranger") == []
    Engine(rig, {"kv.dtype": "fp8"}, model=other, name="own", tenant="a")
    assert differing(rig, "own") == [("kv.dtype", "fp8", "auto")]


def test_what_is_kept_of_a_tenant_is_bounded_and_costs_no_other_its_own() -> None:
    rig = Rig(64 * SLAB, seed=1, keyring=Keyring.ephemeral(("default", "a", "b")))
    known = rig.hierarchy.registry.known
    engine = Engine(rig, {"own": "x"}, tenant="a")
    for n in range(MAX_TENANT_NAMESPACES + 4):
        large = {"large": "x" * (MAX_FACTS - 100)} if n % 3 == 0 else {}
        model = Model(model=n.to_bytes(32, "big"), block_tokens=16 + n)
        other = Engine(rig, large, model=model, name=f"e{n}", tenant="b", ranks={0: large})
        assert all(member.member is None or not member.member.hello.facts for member in other.members)
        other.scheduler.leave()
        rig.settle()
    assert sum(len(text) for texts in known._of["b"].values() for text in texts) <= MAX_TENANT_BYTES
    assert len(known._of["b"]) <= MAX_TENANT_NAMESPACES
    assert list(known._of["a"]) == [engine.scheduler.member.session.tag]  # type: ignore[union-attr]


# the text ------------------------------------------------------------------------------------------------------------


def test_facts_come_back_as_they_were_said() -> None:
    facts = {"b": "2", "a": json.dumps({"x": [1, "é"]})}
    assert facts_of(facts_text(facts)) == facts
    assert facts_text(facts) == facts_text(dict(reversed(facts.items())))


def test_facts_that_are_too_long_are_shortened_where_they_are_longest() -> None:
    facts = {f"short {n}": "x" * 100 for n in range(300)} | {"long": "y" * MAX_FACTS, "middle": "z" * 20_000}
    told = facts_of(text := facts_text(facts))
    assert len(text) <= MAX_FACTS and told["short 7"] == "x" * 100 and told["middle"] == "z" * 20_000
    assert told["long"].startswith("<blake3 ")
    assert facts_of(facts_text(facts | {"long": "n" * MAX_FACTS}))["long"] != told["long"]
    assert facts_text({f"{n}": "x" * 90 for n in range(20_000)}) == b""


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[]", b'{"a": 1}', b"\xff", b'{"a": "\\ud800"}', b'{"a":' * 10_000,
        json.dumps({"a": "x" * MAX_FACTS}).encode(),
    ],
)  # fmt: skip
def test_what_is_no_text_of_facts_says_nothing(text: bytes) -> None:
    assert facts_of(text) == {}


def test_differences_are_found_within_values_and_shown_in_a_line() -> None:
    here = {"config": '{"rope":{"theta":1,"kind":"a"},"n":2}', "same": "1", "only": "x"}
    there = {"config": '{"rope":{"theta":5,"kind":"a"},"n":2}', "same": "1", "long": "\x1b[31m" + "y" * 500}
    assert list(differences(here, there)) == [
        ("config.rope.theta", "1", "5"),
        ("long", "-", "?[31m" + "y" * 72 + "..."),
        ("only", "x", "-"),
    ]
    deep = "[" * 100_000
    assert len(list(differences({"a": deep}, {"a": "{}"}))) == 1


def test_one_layer_stands_for_all() -> None:
    here, there = ({f"group.0.layer.{n}": kind for n in range(80)} for kind in ("a", "b"))
    assert list(differences(here, there)) == [("group.0.layer.0", "a", "b")]


def test_lone_surrogates_are_written_out() -> None:
    assert facts_of(facts_text({"path": "a\udc80"})) == {"path": "a\\udc80"}
