"""Whole blocks for libraries: put, get and contains against a dictionary, in a well of the process and through a
socket, with evictions, a disk below and restarts; then what callers write wrongly, wells that stop, and what is left.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from wells import InThread, eventually, open_files

import stepwell
from lab.rig.suite.amount import some_or_many
from lab.rig.well import RealWell, apart
from stepwell.client import blocks as module
from stepwell.client.blocks import BlockClient
from stepwell.client.kv_model import Array, KvModel
from stepwell.client.scheduler import MAX_RESERVED
from stepwell.client.socket import dial
from stepwell.errors import BackendDown, ConfigError, StepwellError
from stepwell.hierarchy.local import LocalWell, open_threaded

BT = 16
MODEL = KvModel("model", "weights", (2, 256, 1024), "int16", BT)
"""Blocks of 1 MiB: an arena of 64 MiB is soon full."""

SMALL = KvModel("small", "weights", (4, 8), "int32", 4)
HELD = ("pinned_bytes", "leased_blocks", "filling", "quarantined_slots", "sessions")
SHORT_S = 0.5


def content(model: KvModel, tokens: tuple[int, ...], salt: str | None) -> Array:
    """What the last block of these tokens has to be."""
    seed = blake3(f"{salt!r} {tokens!r}".encode()).digest(length=model.block_bytes)
    return np.frombuffer(seed, np.uint8).view(model.dtype).reshape(model.block_shape)


def contents(model: KvModel, tokens: list[int], first: int = 0, salt: str | None = None) -> list[Array]:
    ends = range((first + 1) * model.block_tokens, len(tokens) + 1, model.block_tokens)
    return [content(model, tuple(tokens[:end]), salt) for end in ends]


def buffers(model: KvModel, number: int) -> Array:
    return np.full((number, *model.block_shape), 85, model.dtype)


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("stepwell")}


def held(stats: dict[str, Any]) -> dict[str, int]:
    return {name: stats[name] for name in HELD if stats[name]}


@pytest.fixture
def local() -> Iterator[LocalWell]:
    """A well of this process, whose books balance at the end and in which nothing is held."""
    with open_threaded("64MiB") as well:
        yield well
        well.check()
        eventually(lambda: held(well.stats()) == {})


def client_of(well: LocalWell, model: KvModel = SMALL, **more: Any) -> BlockClient:
    return BlockClient(model, lambda: well.dial, threaded=False, **more)


BRANCHES = st.lists(st.integers(0, 1), min_size=1, max_size=5)
SALTS = st.sampled_from([None, None, None, None, "", "a"])
FIRSTS = st.sampled_from([0, 0, 0, 1, 3])

# --- against a dictionary ---------------------------------------------------------------------------------------------


class AgainstADict(RuleBasedStateMachine):
    """Fewer blocks may be there than were put, never others. Prefixes are few, so that they meet."""

    reads: ClassVar[int] = 0
    stored: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.folder = Path(self.stack.enter_context(TemporaryDirectory(prefix="sw", dir="/var/tmp")))
        self.known: set[tuple[str | None, tuple[int, ...]]] = set()
        self.flood = 1000

    @initialize()
    def begin(self) -> None:
        self.cache = self.open()

    def open(self) -> BlockClient:
        raise NotImplementedError

    def restart(self) -> None:
        raise NotImplementedError

    @staticmethod
    def prefix(branches: list[int]) -> list[int]:
        return [token for branch in branches for token in range(branch, branch + BT)]

    @rule(branches=BRANCHES, first=FIRSTS, salt=SALTS, rest=st.integers(0, BT - 1), again=st.booleans())
    def put(self, branches: list[int], first: int, salt: str | None, rest: int, again: bool) -> None:
        tokens, first = self.prefix(branches), min(first, len(branches) - 1)
        done = self.cache.put(tokens + [7] * rest, contents(MODEL, tokens, first, salt), first=first, salt=salt)
        assert 0 <= done.blocks <= done.asked == len(branches) - first
        assert (done.blocks == done.asked) == (done.reason == "")
        self.known |= {(salt, tuple(tokens[: BT * (at + 1)])) for at in range(first, len(branches))}
        AgainstADict.stored += done.blocks
        if again:
            self.read(branches, first, salt)

    @rule(branches=BRANCHES, first=FIRSTS, salt=SALTS)
    def get(self, branches: list[int], first: int, salt: str | None) -> None:
        self.read(branches, min(first, len(branches) - 1), salt)

    def read(self, branches: list[int], first: int, salt: str | None) -> None:
        tokens = self.prefix(branches)
        into = buffers(MODEL, len(branches) - first)
        done = self.cache.get(tokens, into, first=first, salt=salt)
        assert (done.blocks == done.asked) == (done.reason == "")
        for at, (found, right) in enumerate(zip(into, contents(MODEL, tokens, first, salt), strict=True)):
            if at < done.blocks:
                assert (salt, tuple(tokens[: BT * (first + at + 1)])) in self.known
                assert np.array_equal(found, right)
        AgainstADict.reads += done.blocks

    @rule(branches=BRANCHES, salt=SALTS)
    def contains(self, branches: list[int], salt: str | None) -> None:
        tokens = self.prefix(branches)
        done = self.cache.contains(tokens, salt=salt)
        known = [(salt, tuple(tokens[: BT * (at + 1)])) in self.known for at in range(len(branches))]
        assert done.asked == len(branches) and all(known[: done.blocks])

    @rule(blocks=st.integers(20, 70))
    def push_out(self, blocks: int) -> None:
        self.flood += 1
        tokens = [self.flood * 1000 + at for at in range(blocks * BT)]
        self.cache.put(tokens, np.zeros((blocks, *MODEL.block_shape), np.int16))

    @precondition(lambda self: self.known)
    @rule()
    def another_life(self) -> None:
        self.restart()

    def teardown(self) -> None:
        self.cache.close()
        self.stack.close()


class InProcess(AgainstADict):
    def open(self) -> BlockClient:
        place = self.folder
        return stepwell.open(MODEL, host="64MiB", home=place / "home", disk=place / "disk", disk_size="256MiB")

    def restart(self) -> None:
        self.cache.close()
        self.cache = self.open()


class ThroughASocket(AgainstADict):
    """The well goes and comes again; the client stays, and joins the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.well = InThread(self.folder, disk_bytes=256 << 20)

    def open(self) -> BlockClient:
        return BlockClient(MODEL, lambda: dial(self.well.path), trouble=lambda error: None)

    def restart(self) -> None:
        self.well.close()
        self.well.path.unlink()
        assert self.cache.contains(self.prefix([0]), timeout=SHORT_S).blocks == 0
        self.well = InThread(self.folder, disk_bytes=256 << 20)
        eventually(lambda: self.cache.live)

    def teardown(self) -> None:
        self.cache.close()
        eventually(lambda: self.well.hierarchy.sessions == 0)
        eventually(lambda: held(self.well.hierarchy.stats()) == {})
        self.well.close()
        super().teardown()


@some_or_many("examples", 8, 60)
@pytest.mark.parametrize("machine", [InProcess, ThroughASocket])
def test_blocks_are_those_that_were_put_or_missing(machine: type[AgainstADict], examples: int) -> None:
    AgainstADict.reads = AgainstADict.stored = 0
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
    assert AgainstADict.reads and AgainstADict.stored


# --- what it promises in plain cases ----------------------------------------------------------------------------------


def test_what_was_put_is_there_in_any_form_and_from_any_block_on(local: LocalWell) -> None:
    tokens = list(range(43))  # ten blocks and a rest
    rows = contents(SMALL, tokens)
    with client_of(local) as cache:
        assert cache.contains(tokens) == module.BlocksPresent(0, 10, "never_seen")
        assert cache.put(np.array(tokens, np.uint16), np.stack(rows[:4])) == module.BlocksStored(4, 4)
        assert cache.put(tokens, rows[4:], first=4).blocks == 6
        assert cache.put(tokens, rows) == module.BlocksStored(10, 10), "what is there counts"
        assert cache.contains(tuple(tokens)) == module.BlocksPresent(10, 10)
        into = buffers(SMALL, 3)
        assert cache.get(tokens, list(into), first=7) == module.BlocksRead(3, 3)
        assert np.array_equal(into, rows[7:])
        assert cache.get(tokens, buffers(SMALL, 1), salt="another").reason == "never_seen"
        other = [*tokens[:8], *range(100, 132)]
        found = cache.get(other, buffers(SMALL, 10))
        assert (found.blocks, found.reason) == (2, "never_seen")
        assert held(local.stats()) == {"sessions": 1}, "no call holds anything when it has returned"


def test_models_that_differ_in_anything_share_nothing() -> None:
    local = open_threaded("256MiB")  # a slab for each of them
    tokens, fields = list(range(8)), ("model", "weights", (2, 4), "float16", 4)
    for at, value in enumerate(["model", "another", "another", (4, 2), "int16", 2]):
        changed = [*fields]
        if at:
            changed[at - 1] = value
        model = KvModel(*changed)  # type: ignore[arg-type]
        with client_of(local, model) as cache:
            assert cache.contains(tokens).blocks == 0, changed
            rows = buffers(model, 8 // model.block_tokens)
            eventually(lambda cache=cache, rows=rows: cache.put(tokens, rows).reason == "")  # type: ignore[misc]
    local.close()


def test_more_blocks_than_one_reservation_or_all_pins_can_take(local: LocalWell) -> None:
    tokens = list(range(4 * (2 * MAX_RESERVED + 9)))
    with client_of(local) as cache:
        rows = contents(SMALL, tokens)
        assert cache.put(tokens, rows).reason == ""
        into = buffers(SMALL, len(rows))
        assert cache.get(tokens, into).reason == "" and np.array_equal(into, rows)
    tokens = list(range(40 * BT))  # 40 MiB, of 64: half of it may be pinned
    with client_of(local, MODEL) as cache:
        rows = contents(MODEL, tokens)
        eventually(lambda: cache.put(tokens, rows).reason == "")  # on a busy machine memory takes its time
        into = buffers(MODEL, len(rows))
        assert cache.get(tokens, into).reason == "" and np.array_equal(into, rows)
        assert cache.contains(tokens).blocks == 40


def test_many_threads_at_once(local: LocalWell) -> None:
    wrong: list[str] = []

    def work(cache: BlockClient, seed: int) -> None:
        dice = np.random.default_rng(seed)
        for _ in range(60):
            tokens = [int(branch) * 10 + at for branch in dice.integers(0, 3, 4) for at in range(4)]
            if cache.put(tokens, contents(SMALL, tokens)).blocks != 4:
                wrong.append("not stored")
            into = buffers(SMALL, 4)
            if cache.get(tokens, into).blocks != 4 or not np.array_equal(into, contents(SMALL, tokens)):
                wrong.append("not read")

    with client_of(local) as cache:
        all_threads = [threading.Thread(target=work, args=(cache, seed)) for seed in range(4)]
        for thread in all_threads:
            thread.start()
        for thread in all_threads:
            thread.join()
    assert wrong == []


def test_bytes_that_change_under_the_copy_count_as_missing(local: LocalWell, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = list(range(16))
    plain, copies = module._bytes, 0
    with client_of(local) as cache:
        assert cache.put(tokens, contents(SMALL, tokens)).blocks == 4
        changed: list[Any] = []

        def bytes_of(row: Array) -> Any:
            nonlocal copies
            copies += 1
            if copies == 3:  # its slot is another block's from now on
                changed.extend(cache._worker._slabs._known.values())
                for slab in changed:
                    slab.generations += np.uint64(2)
            return plain(row)

        monkeypatch.setattr(module, "_bytes", bytes_of)
        assert cache.get(tokens, buffers(SMALL, 4)) == module.BlocksRead(2, 4, "not_verified")
        for slab in changed:
            slab.generations -= np.uint64(2)
        monkeypatch.undo()
        assert cache.contains(tokens).blocks == 2, "it is dropped, as what is read at every try and never verified"


def test_an_arena_that_is_held_by_others_refuses_within_the_limit(local: LocalWell) -> None:
    tokens = [1] * BT
    with client_of(local, MODEL) as holder, client_of(local, MODEL) as cache:
        held = [holder._client.reserve(b"", blake3(bytes([n])).digest() * 32, 0) for n in range(4)]
        eventually(lambda: all(spill is not None and spill.granted for spill in held))
        taken = 0
        for n in range(100):
            spill = holder._client.reserve(b"", blake3(bytes([n, n])).digest(), 0)
            assert spill is not None
            eventually(lambda spill=spill: spill.granted)  # type: ignore[misc]
            taken += 1
            if not any(spill.leases):
                break
        assert taken > 30, "all of it is being filled"
        began = time.monotonic()
        assert cache.put(tokens, contents(MODEL, tokens), timeout=SHORT_S) == module.BlocksStored(0, 1, "refused")
        assert cache.get(tokens, buffers(MODEL, 1), timeout=SHORT_S).blocks == 0
        assert time.monotonic() - began < 4 * SHORT_S + 1


# --- what callers write wrongly ---------------------------------------------------------------------------------------

GOOD = list(range(8))
ROWS = contents(SMALL, GOOD)


def read_only() -> Array:
    row = ROWS[0].copy()
    row.flags.writeable = False
    return row


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda c: c.put([1, 2, 3], ROWS[:1]), "3 tokens"),
        (lambda c: c.contains([]), "0 tokens"),
        (lambda c: c.contains([1, 2, 3, -1]), "outside"),
        (lambda c: c.contains([1, 2, 3, 1 << 32]), "outside"),
        (lambda c: c.contains([1, 2, 3, 1 << 70]), "dtype object"),
        (lambda c: c.contains([1.0, 2, 3, 4]), "float64"),
        (lambda c: c.contains(np.zeros((2, 4), int)), "shape (2, 4)"),
        (lambda c: c.contains([[1], [2, 3]]), "array"),
        (lambda c: c.contains("abcd"), "dtype"),
        (lambda c: c.contains(GOOD, salt=7), "salt"),
        (lambda c: c.contains(GOOD, timeout=-1), "timeout"),
        (lambda c: c.contains(GOOD, timeout=float("nan")), "timeout"),
        (lambda c: c.contains(GOOD, timeout=None), "timeout"),
        (lambda c: c.put(GOOD, []), "0 blocks"),
        (lambda c: c.put(GOOD, [*ROWS, ROWS[0]]), "3 blocks"),
        (lambda c: c.put(GOOD, ROWS, first=1), "2 blocks"),
        (lambda c: c.put(GOOD, ROWS, first=2), "first"),
        (lambda c: c.put(GOOD, ROWS, first=-1), "first"),
        (lambda c: c.put(GOOD, 7), "type int"),
        (lambda c: c.put(GOOD, ROWS[0]), "this is one block"),
        (lambda c: c.put(GOOD, [ROWS[0].tolist()]), "no NumPy array"),
        (lambda c: c.put(GOOD, [ROWS[0].astype("float64")]), "float64"),
        (lambda c: c.put(GOOD, [ROWS[0], ROWS[1].T]), "blocks[1]"),
        (lambda c: c.put(GOOD, [np.asfortranarray(ROWS[0])]), "one piece"),
        (lambda c: c.get(GOOD, [np.zeros((4, 16), "int32")[:, ::2]]), "one piece"),
        (lambda c: c.get(GOOD, [read_only()]), "read-only"),
        (lambda c: c.get(GOOD, [ROWS[0].astype(">i4")]), "dtype"),
    ],
)
def test_bad_input_is_said_and_loses_nothing(
    local: LocalWell, call: Callable[[BlockClient], object], says: str
) -> None:
    with client_of(local) as cache:
        eventually(lambda: cache.put(GOOD, ROWS).blocks == 2)  # the first slab may be late on a busy machine
        with pytest.raises(ConfigError) as caught:
            call(cache)
        error = caught.value
        assert error.code == "SW-136" and says in f"{error.what} {error.why}" and error.fix
        into = buffers(SMALL, 2)
        assert cache.get(GOOD, into).blocks == 2 and np.array_equal(into, ROWS)


@pytest.mark.parametrize(
    "fields",
    [
        ("", "f", (1,), "int8", 1),
        ("m", "", (1,), "int8", 1),
        ("m", b"f", (1,), "int8", 1),
        ("m", "f", (), "int8", 1),
        ("m", "f", (0,), "int8", 1),
        ("m", "f", (1.5,), "int8", 1),
        ("m", "f", 4, "int8", 1),
        ("m", "f", (1,), "bfloat17", 1),
        ("m", "f", (1,), object, 1),
        ("m", "f", (1,), "int8", 0),
        ("m", "f", (1,), "int8", 2.0),
    ],
)
def test_models_that_there_are_not(fields: Any) -> None:
    with pytest.raises(ConfigError, match="SW-136"):
        KvModel(*fields)


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"disk": "/var/tmp/d"}, "SW-102"),
        ({"host": "64MiB", "disk": "/var/tmp/d"}, "SW-102"),
        ({"host": "64MiB", "socket": "/s"}, "SW-102"),
        ({"home": "/h", "socket": "/s"}, "SW-102"),
        ({"socket": "/" + "s" * 200}, "SW-109"),
        ({"host": "much"}, "SW-102"),
        ({"host": "1MiB"}, "SW-107"),
        ({"host": "64MiB", "timeout": -1}, "SW-136"),
        ({"host": "64MiB", "home": "/dev/null/home"}, "SW-601"),
    ],
)
def test_wells_that_cannot_be(more: dict[str, Any], code: str) -> None:
    before = threads()
    with pytest.raises(StepwellError) as caught:
        stepwell.open(MODEL, **more)
    assert caught.value.code == code
    eventually(lambda: threads() == before)


def test_after_close_and_in_a_fork_it_says_so(local: LocalWell, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = client_of(local)
    monkeypatch.setattr(cache, "_process", 1)
    with pytest.raises(ConfigError, match="forked"):
        cache.contains(GOOD)
    monkeypatch.undo()
    cache.close()
    cache.close()
    for call in (lambda: cache.put(GOOD, ROWS), lambda: cache.get(GOOD, ROWS), lambda: cache.contains(GOOD)):
        with pytest.raises(ConfigError, match="SW-137"):
            call()


# --- wells that stop, and what is left --------------------------------------------------------------------------------


def test_a_stopped_a_killed_and_another_well() -> None:
    tokens, seconds = list(range(3 * BT)), 0.3
    rows = contents(MODEL, tokens)
    with apart() as folder, RealWell(folder / "home", host="64MiB", disk=f"{folder}/disk:256MiB") as well:
        with stepwell.open(MODEL, home=folder / "home") as cache:
            assert cache.put(tokens, rows).blocks == 3
            well.signal(signal.SIGSTOP)
            for call in (
                lambda: cache.put([9] * BT, rows[:1], timeout=seconds),
                lambda: cache.get(tokens, buffers(MODEL, 3), timeout=seconds),
                lambda: cache.contains(tokens, timeout=seconds),
            ):
                began = time.monotonic()
                found = call()
                assert (found.blocks, found.reason) == (0, "time_limit")
                assert time.monotonic() - began < seconds + 1
            with stepwell.open(SMALL, home=folder / "home", timeout=seconds) as other:
                assert not other.live
            well.signal(signal.SIGCONT)
            eventually(lambda: cache.contains(tokens).blocks == 3)
            eventually(well.written)
            well.kill()
            eventually(lambda: not cache.live)
            assert cache.get(tokens, buffers(MODEL, 3)).reason == "no_session"
            assert cache.put(tokens, rows).reason == "no_session"
            well.start()
            eventually(lambda: cache.live)
            into = buffers(MODEL, 3)
            eventually(lambda: cache.get(tokens, into).blocks == 3)
            assert np.array_equal(into, rows), "from the disk of the earlier one"
        eventually(lambda: not well.held() and well.count("sessions") == 0)


def test_a_client_that_is_closed_before_its_well_answers_leaves_nothing_held() -> None:
    with apart() as folder, RealWell(folder / "home", host="64MiB") as well:
        for _ in range(3):
            with stepwell.open(MODEL, home=folder / "home") as cache:
                assert cache.put([1] * BT, contents(MODEL, [1] * BT)).blocks == 1
                well.signal(signal.SIGSTOP)
                assert cache.put([2] * BT, contents(MODEL, [2] * BT), timeout=0.1).reason == "time_limit"
                threading.Timer(0.2, well.signal, [signal.SIGCONT]).start()
            eventually(lambda: not well.held() and well.count("sessions") == 0)


def test_a_well_that_is_not_there_is_waited_for_and_then_joined() -> None:
    with apart() as folder:
        began = time.monotonic()
        with stepwell.open(SMALL, home=folder / "home", timeout=0.2) as cache:
            assert time.monotonic() - began < 5 and not cache.live
            assert cache.contains(GOOD) == module.BlocksPresent(0, 2, "no_session")
            with RealWell(folder / "home", host="64MiB"):
                eventually(lambda: cache.live)
                assert cache.put(GOOD, ROWS).blocks == 2


def test_trouble_is_told_once(tmp_path: Path) -> None:
    told: list[StepwellError] = []

    def find() -> Any:
        raise BackendDown("SW-505", what="none", why="none", fix="none")

    with BlockClient(SMALL, find, timeout=0.5, trouble=told.append):
        pass
    assert 1 <= len(told) <= 2, "by each member"


def test_nothing_is_left_of_it(tmp_path: Path) -> None:
    with TemporaryDirectory(prefix="sw", dir="/tmp") as folder:
        well = InThread(Path(folder))
        before, running = open_files(), threads()
        for _ in range(3):
            with BlockClient(MODEL, lambda: dial(well.path)) as cache:
                cache.put([1] * BT, contents(MODEL, [1] * BT))
                cache.get([1] * BT, buffers(MODEL, 1))
                with pytest.raises(ConfigError):
                    cache.get([1], [])
        eventually(lambda: threads() == running and well.hierarchy.sessions == 0)
        assert not {file for file in open_files() - before if "stepwell-slab" not in file}
        well.close()
    before, running = open_files(), threads()
    for _ in range(2):
        with stepwell.open(MODEL, host="64MiB", home=tmp_path / "home") as cache:
            cache.put([1] * BT, contents(MODEL, [1] * BT))
    eventually(lambda: threads() == running)
    assert open_files() == before


def test_close_while_others_call(local: LocalWell) -> None:
    cache, ended = client_of(local), threading.Event()
    tokens = list(range(400))

    def call() -> None:
        try:
            while True:
                cache.put(tokens, contents(SMALL, tokens))
                cache.get(tokens, buffers(SMALL, 100))
        except ConfigError:
            ended.set()

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.1)
    cache.close()
    assert ended.wait(10)
    thread.join()
