"""What a seed makes of a world: sizes, models, prompts, and how often what happens. Small, so that all is short all the
time: a few dozen blocks fill the arena, a few segments the disk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random

from stepwell.block.digest import Chain
from stepwell.block.frame import frame_bytes
from stepwell.block.groups import GroupKind, GroupRule
from stepwell.block.layout import PAGE, SlabLayout
from stepwell.engines.common.plan import Shape
from stepwell.policies.catalog import PLACEMENTS, POLICIES
from stepwell.tiers.disk.layout import Footer

EPOCHS = (0, 7)

BLOCK_TOKENS = 4
"""Of models with several cache groups; others need not know."""

_FULL, _FINE = GroupRule(GroupKind.FULL, 4), GroupRule(GroupKind.FULL, 2)
_WINDOW, _STATE = GroupRule(GroupKind.WINDOW, 4, 6), GroupRule(GroupKind.STATE, 4)
GROUPS = (
    (_FULL, _WINDOW),
    (_FINE, _WINDOW, _WINDOW),
    (_FULL, GroupRule(GroupKind.WINDOW, 2, 4), _STATE),
    (_FULL, GroupRule(GroupKind.CHUNK, 4, 8)),
    (_FULL, _STATE, _STATE),
)
"""Cache groups of a model: windows of three blocks, some beside a group with two pages in a block; a window of two
pages; chunks of two blocks; states."""


@dataclass(frozen=True, slots=True)
class Model:
    """What engines of one kind say of themselves. `world` ranks with `shard_bytes` each, of which `replicas` in a row
    hold the same. `groups`: rules of its cache groups; where there are none, it has one and needs every token."""

    weights: bytes
    world: int
    shard_bytes: int
    replicas: int = 1
    groups: tuple[GroupRule, ...] = ()

    @property
    def shards(self) -> int:
        return self.world // self.replicas

    @property
    def shape(self) -> Shape:
        """Of a model with groups."""
        return _shape(self)

    @property
    def frames(self) -> int:
        """Bytes of a block on disk."""
        return self.shards * frame_bytes(self.shard_bytes)


@dataclass(frozen=True, slots=True)
class Setup:
    """`prompts` are digests, 32 bytes a block. `segment` and `segments`: bytes of a file, files of a directory.
    `write`: the name of a write policy. `prefetch`: conversations that go on at regular times are brought up.
    `remote`: there is a tier that others share below the disk."""

    sealed: bool
    models: tuple[Model, ...]
    prompts: tuple[bytes, ...]
    host_bytes: int
    queue_bytes: int
    readers: int
    directories: int
    segment: int
    segments: int
    reserve: int
    write: str
    prefetch: bool
    remote: bool = False

    def with_remote(self) -> Setup:
        """The same with a tier that others share below the disk."""
        return replace(self, remote=True)

    def with_groups(self, dice: Random) -> Setup:
        """The same with two models that have several cache groups, before one that has not, and room for what they
        need at a time: prompts of a few blocks, each of which has several parts."""
        plain, groups = self.models[0], dice.sample(GROUPS, 2)
        some = [replace(plain, weights=bytes([n]) * 32, groups=rules) for n, rules in enumerate(groups)]
        slab = SlabLayout(plain.shard_bytes, 8).nbytes
        return replace(self, models=(*some, plain), host_bytes=dice.randint(5, 8) * slab)

    @property
    def policy(self) -> str:
        """Drawn with the prompts."""
        return sorted(POLICIES)[self.prompts[0][0] % len(POLICIES)]

    @property
    def placement(self) -> str:
        return sorted(PLACEMENTS)[self.prompts[0][1] % len(PLACEMENTS)]

    @classmethod
    def draw(cls, dice: Random, *, small: bool = False, write: str = "through", prefetch: bool = False) -> Setup:
        """`small`: one model and few blocks, for what is done a hundred thousand times."""
        models = [Model(b"w" * 32, dice.choice((1, 1, 2)), dice.choice((2048, 4096)))]
        if not small and dice.random() < 0.5:
            world, shard_bytes = dice.choice((1, 2)), dice.choice((models[0].shard_bytes, 6000))
            models.append(Model(b"x" * 32, world, shard_bytes, replicas=world))
        slab = max(SlabLayout(model.shard_bytes, 8).nbytes for model in models)
        longest = max(model.frames for model in models)
        room = dice.randint(3, 8 if small else 14) * longest
        segment = PAGE + room + Footer.nbytes(room // longest)
        return cls(
            sealed=dice.random() < 0.7,
            models=tuple(models),
            prompts=prompts(dice, 3 if small else 6, 5 if small else 10),
            host_bytes=dice.randint(1 if len(models) == 1 else 2, 4) * slab,
            queue_bytes=dice.choice((0, 4, 64)) * longest,
            readers=dice.randint(1, 4),
            directories=dice.choice((1, 1, 2)),
            segment=segment,
            segments=dice.randint(2, 4 if small else 6),
            reserve=dice.choice((0, 0, 2)) * segment,
            write=write,
            prefetch=prefetch,
        )


@lru_cache
def _shape(model: Model) -> Shape:
    return Shape(BLOCK_TOKENS, BLOCK_TOKENS, model.shard_bytes, model.world, model.replicas, model.groups)


def prompts(dice: Random, count: int, most: int) -> tuple[bytes, ...]:
    """Some share their beginning with the one before."""
    made: list[list[int]] = []
    for _ in range(count):
        shared = made[-1][: dice.randrange(most)] if made and dice.random() < 0.5 else []
        made.append([*shared, *(dice.randrange(1 << 20) for _ in range(dice.randint(2, most) - len(shared)))])
    chains = []
    for tokens in made:
        chain = Chain(1)
        chain.extend(tokens)
        chains.append(chain.digests)
    return tuple(chains)
