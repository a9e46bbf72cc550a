"""No key in a core dump of a well, no key and no block in one of an engine's client: rows of the campaign `secrets`.

What is searched for is searched for in the living memory of the same processes first: where it is not found there, a
search proves nothing, and the row says so with 0 cases.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from lab.rig.session import BLOCK_TOKENS, LAYOUT, MODEL, WEIGHTS
from lab.trust.budget import Budget
from lab.trust.report import Row
from lab.trust.secrets import cores, courier
from lab.trust.secrets.stage import Stage
from stepwell.block.namespace import DEFAULT_TENANT, Namespace, layout_of_session
from stepwell.client import control
from stepwell.hierarchy.arena.origin import Origin, SegmentKeys
from stepwell.tiers.disk.layout import Head
from stepwell.vault.keyring import Keyring

BLOCKS = 8
_REGISTERS = 32 * 64  # bytes of a thread's vector registers
_KERNEL = "the kernel dumps no well, and nothing of its memory"
_WELL = "no key in a core dump of the well, forced by root"
_CLIENT = "no key and no block in a core dump of an engine's client"
_SOCKET = "no key and no block id in what the well sends"
DUMPS_LIFTED = (
    "import resource, ctypes; from stepwell.io.process import dumps; forbid = dumps.forbid; "
    "dumps.forbid = lambda: (forbid(), resource.setrlimit(resource.RLIMIT_CORE, (-1, -1)), "
    "ctypes.CDLL(None).prctl(4, 1, 0, 0, 0))"
)
"""A well that the kernel would dump: what is left is that nothing of its memory goes into dumps."""

Secrets = dict[str, list[bytes]]


def run(budget: Budget) -> Iterator[Row]:
    yield of_the_kernel(budget)
    if why := cores.can_force():
        for promise in (_WELL, _CLIENT, _SOCKET):
            yield Row(promise, 0, 0, budget.seed, f"not tried: {why}")
        return
    with Stage() as stage:
        client = stage.courier()
        move(stage, client)
        keys, ids = keys_of(stage), ids_of(stage)
        markers: Secrets = {"blocks": [courier.marker(n) for n in range(BLOCKS)]}
        alive = cores.found(cores.memory(stage.well.pid, stage.folder / "well.mem"), keys | markers)
        yield _well(budget, stage, client, keys | markers, alive)
        heard = cores.found(stage.heard, keys | ids)
        yield Row(_SOCKET, len(keys) + len(ids), len(heard), budget.seed, "all of some sessions", tuple(heard))
        alive = cores.found(cores.memory(client.pid, stage.folder / "client.mem"), keys | markers)
        yield _client(budget, stage, client, keys | markers, alive)


def _well(budget: Budget, stage: Stage, client: subprocess.Popen[str], secrets: Secrets, alive: dict[str, int]) -> Row:
    """Dumps that root forces, of a well that waits and of one at work; then those that the kernel would write."""
    if missing := secrets.keys() - alive.keys():
        return Row(_WELL, 0, 0, budget.seed, f"nothing shown: {', '.join(sorted(missing))} not in its living memory")
    dice, found, tried = budget.dice("dumps"), list[str](), 0
    threads = _threads(stage)
    for n in range(budget.of(ci=12, full=1000)):
        if budget.over:
            break
        if busy := n % 2:
            assert client.stdin is not None and client.stdout is not None
            control.clear(stage.home, ["host"], socket=stage.socket)
            client.stdin.write(f"recall 0 {BLOCKS}\n")
            client.stdin.flush()
            time.sleep(dice.random() * 0.02)
        core = cores.forced(stage.well.pid, stage.folder / "core")
        leaks = _beyond_registers(cores.found(core, secrets), threads)
        found += [f"{'at work' if busy else 'waiting'}, dump {n}: {leaks}"] if leaks else []
        core.unlink()
        tried += 1
        if busy:
            stage.say(client)
    return Row(
        _WELL,
        tried,
        len(found),
        budget.seed,
        "by gcore; of blocks no more than registers hold",
        tuple(found[:5]),
    )


def of_the_kernel(budget: Budget) -> Row:
    """A well that aborts is not dumped; with the two guards for that taken out, its dump has none of its memory."""
    if not cores.goes_here():
        return Row(_KERNEL, 0, 0, budget.seed, "not tried: the kernel gives cores to a program (core_pattern)")
    found = list[str]()
    with Stage() as stage:
        core = cores.of_the_kernel(stage.well, stage.folder / "well")
        found += ["a well that aborted was dumped"] if core else []
    with Stage(before=DUMPS_LIFTED) as stage:
        move(stage, stage.courier())
        secrets = keys_of(stage) | {"blocks": [courier.marker(n) for n in range(BLOCKS)]}
        threads = _threads(stage)
        core = cores.of_the_kernel(stage.well, stage.folder / "well")
        leaks = _beyond_registers(cores.found(core, secrets), threads) if core else {}
        found += [f"with dumps switched on again: {leaks}"] if leaks else []
    remark = "a well that aborts leaves no dump; with that guard lifted, one without memory"
    tried = 2 if core else 1
    return Row(_KERNEL, tried, len(found), budget.seed, remark, tuple(found))


def _threads(stage: Stage) -> int:
    return len(os.listdir(f"/proc/{stage.well.pid}/task"))


def _beyond_registers(leaks: dict[str, int], threads: int) -> dict[str, int]:
    """A thread at work has some bytes of a block in its registers, and every dump has those: no more of blocks than
    they hold is allowed, and nothing of keys."""
    few = leaks.get("blocks", 0) * len(courier.marker(0)) <= threads * _REGISTERS
    return {name: times for name, times in leaks.items() if not (few and name == "blocks")}


def _client(
    budget: Budget, stage: Stage, client: subprocess.Popen[str], secrets: Secrets, alive: dict[str, int]
) -> Row:
    if "blocks" not in alive:
        return Row(_CLIENT, 0, 0, budget.seed, "nothing shown: blocks are not in its living memory")
    core: Path | None
    if cores.goes_here():
        core = cores.of_the_kernel(client, stage.folder / "courier")
    else:
        core = cores.forced(client.pid, stage.folder / "core")
    if core is None:
        return Row(_CLIENT, 0, 0, budget.seed, "not tried: no core of it could be taken")
    found = sorted({*cores.found(core, secrets), *(alive.keys() - {"blocks"})})
    return Row(_CLIENT, len(secrets), len(found), budget.seed, "an ordinary dump, nothing forbidden", tuple(found))


def move(stage: Stage, client: subprocess.Popen[str]) -> None:
    """Spills some blocks and recalls them from memory and from disk. Raises OSError if that does not work."""
    told = [stage.say(client, f"spill 0 {BLOCKS}")]
    stage.written()
    told.append(stage.say(client, f"recall 0 {BLOCKS}"))
    control.clear(stage.home, ["host"], socket=stage.socket)
    told.append(stage.say(client, f"recall 0 {BLOCKS}"))
    if told != [str(BLOCKS)] * 3:
        raise OSError(f"blocks were not spilled and recalled: {told} {stage.said('courier')[-300:]}")


def keys_of(stage: Stage) -> Secrets:
    """Every key that the well has: of its tenant, of block ids, of each segment."""
    (epoch,) = Keyring.read(stage.home / "keyring").tenant(DEFAULT_TENANT).epochs
    keys = {"tenant key": epoch.key, "id key": epoch.id_key}
    for path in stage.disk.glob("*.seg"):
        with path.open("rb") as file:
            head = Head.parse(file.read(4096))
        if head is not None:
            keys[f"key of segment {path.name}"] = epoch.segment_key(head.id)[0]
    return {name: list(cores.shapes(bytes(key))) for name, key in keys.items()}


def ids_of(stage: Stage) -> Secrets:
    """The ids of the blocks that were moved, which confirm a guessed prompt."""
    (epoch,) = Keyring.read(stage.home / "keyring").tenant(DEFAULT_TENANT).epochs
    layout = layout_of_session(LAYOUT, [LAYOUT], courier.SHARD)
    namespace = Namespace(WEIGHTS, MODEL, layout, BLOCK_TOKENS)
    origin = Origin(epoch, SegmentKeys(epoch), namespace)
    return {f"id of block {n}": [bytes(origin.name(courier.digest(n)))] for n in range(BLOCKS)}
