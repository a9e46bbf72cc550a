"""A disk tier over real files that somebody changes between its lives: flips, exchanges, old copies put back."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

from lab.trust.format.made import NAMESPACES, NOW, ORIGINS, STRANGERS, Block, Maker
from lab.trust.format.pieces import Tally, Turn
from stepwell.block.layout import PAGE, MiB
from stepwell.io.files import SystemFiles
from stepwell.testing.clock import SetClock
from stepwell.testing.executor import SeededExecutor
from stepwell.tiers.base import Reading, Writing
from stepwell.tiers.disk.tier import DiskTier, Site

NBYTES, SHARDS = 2000, 2
_LIMIT = 64 * MiB  # four segments of 16 MiB
_EACH = 9  # blocks written by a life
_HEAD, _TAIL = 64 * PAGE, 8 * PAGE
"""What is written of a segment lies within these many bytes of its ends."""

Ends = tuple[bytes, bytes]
Copy = dict[str, Ends]


class Life:
    """One life of the tier over `folder`; what an earlier one left has been found."""

    def __init__(self, folder: Path, maker: Maker, seed: int) -> None:
        self._maker = maker
        self._files = SystemFiles(folder)
        self._executor = SeededExecutor(seed)
        site = Site(self._files, _LIMIT, 0)
        self.tier = DiskTier([site], self._executor, SetClock(), lambda: NOW, maker.sealing)
        self.tier.recover(lambda blocks: None)
        self._executor.drain()

    def put(self, block: Block) -> Writing:
        answers: list[list[Writing]] = []
        self.tier.write([self._maker.outgoing(block)], answers.append)
        self._executor.drain()
        return answers[0][0]

    def get(self, block: Block) -> Reading:
        answers: list[list[Reading]] = []
        self.tier.read([self._maker.incoming(block)], answers.append)
        self._executor.drain()
        return answers[0][0]

    def end(self, *, settled: bool = True) -> None:
        if settled:
            self.tier.settle(lambda: None)
            self._executor.drain()
        self.tier.close()
        self._files.close()


@dataclass(slots=True)
class Place:
    """A directory with lives behind it, the blocks that they wrote, and copies of its files after each."""

    folder: Path
    maker: Maker
    blocks: list[Block]
    copies: list[Copy]

    def judge(self, tally: Tally, seed: int, what: str) -> None:
        """A next life reads all blocks: right bytes, or misses that leave nothing."""
        life = Life(self.folder, self.maker, seed)
        for block in self.blocks:
            tally.cases += 1
            if life.get(block) is Reading.GOOD:
                tally.right += 1
                if not self.maker.right(block):
                    tally.wrong(f"{what}: other bytes of {block}")
            elif any(self.maker.slot(n).any() and not (self.maker.slot(n) == 0xEE).all() for n in range(SHARDS)):
                tally.wrong(f"{what}: {block} left something in a slot")
        life.end(settled=False)

    def restore(self, copy: Copy) -> None:
        for path in _segments(self.folder):
            if path.name not in copy:
                path.unlink()
        for name, (head, tail) in copy.items():
            path = self.folder / name
            with path.open("r+b" if path.exists() else "w+b") as file:
                file.truncate(16 * MiB)
                file.write(head)
                file.seek(-_TAIL, 2)
                file.write(tail)


@contextmanager
def place(turn: Turn, *, sealed: bool, lives: int) -> Iterator[Place]:
    """Some lives have written here, of several tenants and namespaces: one after the other, into one segment each, the
    fifth and later ones into files that were used before. Each second one was killed before it wrote a footer."""
    dice = turn.dice("place")
    with tempfile.TemporaryDirectory(prefix="stepwell-trust-") as name:
        made = Place(Path(name), Maker(NBYTES, SHARDS, sealed=sealed), [], [])
        for number in range(lives):
            life = Life(made.folder, made.maker, dice.randrange(1 << 30))
            for n in range(_EACH):
                block = Block(dice.randrange(len(ORIGINS)), dice.randrange(len(NAMESPACES)), _EACH * number + n)
                if life.put(block) is Writing.STORED:
                    made.blocks.append(block)
            life.end(settled=number % 2 == 0)
            made.copies.append(copy_of(made.folder))
        yield made


def copy_of(folder: Path) -> Copy:
    copy: Copy = {}
    for path in _segments(folder):
        with path.open("rb") as file:
            head = file.read(_HEAD)
            file.seek(-_TAIL, 2)
            copy[path.name] = head, file.read()
    return copy


def _segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.seg"))


def flips(turn: Turn, number: int, sealed: bool, times: int) -> Tally:
    """One bit of what was written, anywhere in the directory."""
    tally, dice = Tally(), turn.dice()
    with place(turn, sealed=sealed, lives=4) as there:
        whole = there.copies[-1]
        for _ in range(times):
            name = dice.choice(sorted(whole))
            written = [at for at in range(0, _HEAD, PAGE) if any(whole[name][0][at : at + PAGE])]
            at = dice.choice([*written, 16 * MiB - PAGE, 16 * MiB - 2 * PAGE]) + dice.randrange(PAGE)
            bit = dice.randrange(8)
            with (there.folder / name).open("r+b") as file:
                file.seek(at)
                (old,) = file.read(1)
                file.seek(at)
                file.write(bytes([old ^ 1 << bit]))
            there.judge(tally, dice.randrange(1 << 30), f"{turn.name}: bit {bit} of byte {at} of {name}")
            there.restore(whole)
            if turn.over:
                break
    return tally


def exchanges(turn: Turn, number: int, sealed: bool, times: int) -> Tally:
    """Pages, runs of pages, heads, footers and whole files change places; `times`: of random pages."""
    tally, dice = Tally(), turn.dice()
    with place(turn, sealed=sealed, lives=4) as there:
        whole = there.copies[-1]
        names = sorted(whole)
        for what, changed in _exchanged(whole, names):
            there.restore(changed)
            there.judge(tally, dice.randrange(1 << 30), f"{turn.name}: {what}")
        for _ in range(times):
            one, other = dice.choice(names), dice.choice(names)
            pages, first, second = dice.choice((1, 2, 4)), dice.randrange(1, 40), dice.randrange(1, 40)
            changed = whole | _with_pages(whole, one, other, first * PAGE, second * PAGE, pages * PAGE)
            there.restore(changed)
            what = f"{pages} pages: {one}, {first} with {other}, {second}"
            there.judge(tally, dice.randrange(1 << 30), f"{turn.name}: {what}")
            if turn.over:
                break
    return tally


def _exchanged(whole: Copy, names: list[str]) -> Iterator[tuple[str, Copy]]:
    """Each file's head, frames, footer, or all of it, in each other file, and under a name of its own beside it."""
    parts: dict[str, Callable[[Ends, Ends], Ends]] = {
        "file": lambda mine, other: other,
        "head": lambda mine, other: (other[0][:PAGE] + mine[0][PAGE:], mine[1]),
        "frames": lambda mine, other: (mine[0][:PAGE] + other[0][PAGE:], mine[1]),
        "footer": lambda mine, other: (mine[0], other[1]),
    }
    for one, other in permutations(names, 2):
        for part, mixed in parts.items():
            yield f"{part} of {other} in {one}", whole | {one: mixed(whole[one], whole[other])}
            both = {one: mixed(whole[one], whole[other]), other: mixed(whole[other], whole[one])}
            yield f"{part} of {other} and of {one}", whole | both
    for one in names:
        yield f"{one} twice", whole | {"f" * 16 + ".seg": whole[one]}


def _with_pages(whole: Copy, one: str, other: str, first: int, second: int, nbytes: int) -> Copy:
    """These ranges have changed places."""
    texts = {name: bytearray(whole[name][0]) for name in {one, other}}
    kept = bytes(texts[one][first : first + nbytes]), bytes(texts[other][second : second + nbytes])
    texts[one][first : first + nbytes], texts[other][second : second + nbytes] = kept[1], kept[0]
    return {name: (bytes(text), whole[name][1]) for name, text in texts.items()}


def replays(turn: Turn, number: int, sealed: bool, times: int) -> Tally:
    """Old copies: of the whole directory, of each one file, and `times` mixtures of the files of several moments; the
    files have been used again since, and what is written then does not deceive who comes after it either."""
    tally, dice = Tally(), turn.dice()
    with place(turn, sealed=sealed, lives=10) as there:
        for what, changed in _replayed(there.copies):
            there.restore(changed)
            there.judge(tally, dice.randrange(1 << 30), f"{turn.name}: {what}")
        for number in range(times):
            moments = {name: dice.choice(there.copies) for name in sorted(there.copies[-1])}
            mixture = {name: copy[name] for name, copy in moments.items() if name in copy}
            there.restore(mixture)
            there.judge(tally, dice.randrange(1 << 30), f"{turn.name}: mixture {number}")
            life = Life(there.folder, there.maker, dice.randrange(1 << 30))
            for n in range(3):
                block = Block(number=1_000_000 + 3 * number + n)
                if life.put(block) is not Writing.STORED:
                    continue
                if life.get(block) is not Reading.GOOD or not there.maker.right(block):
                    tally.wrong(f"{turn.name}: after mixture {number}, {block} is not what was just written")
            life.end(settled=dice.random() < 0.5)
            there.judge(tally, dice.randrange(1 << 30), f"{turn.name}: mixture {number}, written on")
            if turn.over:
                break
    return tally


def _replayed(copies: list[Copy]) -> Iterable[tuple[str, Copy]]:
    last = copies[-1]
    for moment, copy in enumerate(copies):
        yield f"all of moment {moment}", copy
        for name in copy:
            yield f"{name} of moment {moment}", last | {name: copy[name]}
            if name in last:
                halves = (copy[name][0], last[name][1]), (last[name][0], copy[name][1])
                yield f"{name}, first half of moment {moment}", last | {name: halves[0]}
                yield f"{name}, second half of moment {moment}", last | {name: halves[1]}


def another_home(turn: Turn, number: int) -> Tally:
    """A directory under another keyring, and under none of its tenants: all of it stays, none of it opens."""
    tally, dice = Tally(), turn.dice()
    with place(turn, sealed=True, lives=4) as there:
        before = there.copies[-1]
        stranger = Maker(NBYTES, SHARDS, sealed=True, keyring=STRANGERS)
        life = Life(there.folder, stranger, dice.randrange(1 << 30))
        for block in there.blocks:
            tally.cases += 1
            if life.get(block) is Reading.GOOD:
                tally.wrong(f"{turn.name}: {block} opened under another key")
        for n in range(40):
            life.put(Block(number=n))
        life.end()
        kept = copy_of(there.folder)
        for name, piece in before.items():
            tally.cases += 1
            if kept.get(name) != piece:
                tally.wrong(f"{turn.name}: {name} of other keys was changed")
        there.judge(tally, dice.randrange(1 << 30), f"{turn.name}: back under its own keys")
    return tally
