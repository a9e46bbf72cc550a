"""Real core dumps, those that the kernel writes and those that root forces: what of a secret is in them, and that the
search finds it where a guard is taken out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.trust.secrets import cores, courier
from lab.trust.secrets.dumps import BLOCKS, DUMPS_LIFTED, keys_of, move
from lab.trust.secrets.stage import Stage
from stepwell.client import control
from stepwell.vault.keyring import Epoch

NO_GUARD = "import resource; from stepwell.io.process import dumps; dumps.forbid = lambda: " \
    "resource.setrlimit(resource.RLIMIT_CORE, (-1, -1))"  # fmt: skip

pytestmark = pytest.mark.kernel
forced = pytest.mark.skipif(bool(cores.can_force()), reason=cores.can_force())
of_the_kernel = pytest.mark.skipif(not cores.goes_here(), reason="core_pattern gives cores to a program")


def blocks() -> dict[str, list[bytes]]:
    return {"blocks": [courier.marker(n) for n in range(BLOCKS)]}


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage() as stage:
        yield stage


@forced
def test_what_root_forces_has_no_memory_of_a_well_and_no_blocks_of_a_client(stage: Stage) -> None:
    client = stage.courier()
    move(stage, client)
    secrets = keys_of(stage) | blocks()
    assert len(secrets) >= 4
    alive = cores.found(cores.memory(stage.well.pid, stage.folder / "memory"), secrets)
    assert alive.keys() == secrets.keys(), "or the search would prove nothing"
    for _ in range(3):
        control.clear(stage.home, ["host"], socket=stage.socket)
        stage.say(client, f"recall 0 {BLOCKS}")
        core = cores.forced(stage.well.pid, stage.folder / "core")
        assert core.stat().st_size < 1 << 20
        assert cores.found(core, secrets) == {}
        core.unlink()
    assert cores.found(cores.memory(client.pid, stage.folder / "memory"), secrets).keys() == {"blocks"}


@of_the_kernel
def test_a_well_that_aborts_is_not_dumped(stage: Stage) -> None:
    assert cores.of_the_kernel(stage.well, stage.folder / "well") is None


@of_the_kernel
@pytest.mark.parametrize(
    ("before", "in_it"),
    [(DUMPS_LIFTED, set[str]()), (NO_GUARD, {"id key"})],
    ids=["dumps switched on again", "no guard at all"],
)
def test_the_dump_of_a_well_that_can_be_dumped(before: str, in_it: set[str]) -> None:
    """Keys of tenant and segments are not in it even then: they lie in memory that is left out. The key of block ids is
    in BLAKE3's own state too."""
    with Stage(before=before) as stage:
        client = stage.courier()
        move(stage, client)
        secrets = keys_of(stage) | blocks()
        core = cores.of_the_kernel(stage.well, stage.folder / "well")
        assert core is not None and core.stat().st_size > 4096
        assert cores.found(core, secrets).keys() == in_it


@of_the_kernel
def test_an_ordinary_dump_of_an_engines_client_has_no_key_and_no_block(stage: Stage) -> None:
    client = stage.courier()
    move(stage, client)
    secrets = keys_of(stage) | blocks()
    core = cores.of_the_kernel(client, stage.folder / "courier")
    assert core is not None and core.stat().st_size > 1 << 20
    assert cores.found(core, secrets) == {}


NAMING = """
import sys
from stepwell.block.namespace import Namespace
from stepwell.hierarchy.arena.origin import Origin, SegmentKeys
from stepwell.io.process import dumps
from stepwell.vault.keyring import Epoch

dumps.FILTER.write_text("0")
epoch = Epoch(1, bytes(range(32)))
origin = Origin(epoch, SegmentKeys(epoch), Namespace(b"w" * 32, b"m" * 32, b"l" * 32, 16))
for n in range(200):
    origin.name(bytes([n]) * 32)
dumps.clear_registers()
print("named", flush=True)
sys.stdin.read()
"""


@forced
def test_registers_hold_no_key_of_what_was_named_before(tmp_path: Path) -> None:
    """Without `clear_registers` they do: seen on a processor with AVX-512, in every dump."""
    with subprocess.Popen(
        [sys.executable, "-c", NAMING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "named\n"
        core = cores.forced(process.pid, tmp_path / "core")
    key = bytes(Epoch(1, bytes(range(32))).id_key)
    assert cores.found(core, {"id key": cores.shapes(key)}) == {}
