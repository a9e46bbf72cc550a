"""Real engines, real wells, one small real model: what the end-to-end tests share.

Starting an engine takes 10 to 40 s, so a module starts few and its tests run in the order of the file, each going on
where the one before left the engine. Every module has a well of its own, in a home and a runtime directory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.rig.left import shared_memory
from stepwell.demo import documents
from stepwell.demo import model as models
from stepwell.demo.progress import PlainProgress

from .wells import Well, eventually


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(900))  # a module's first test pays for the start of its engine


@pytest.fixture(scope="session")
def model() -> Path:
    """Folder of SmolLM2-135M-Instruct, converted now if this machine has not got it yet."""
    return models.prepare(None, PlainProgress())


@pytest.fixture(scope="session")
def texts(model: Path) -> list[list[int]]:
    """A dozen beginnings of real documents, 700 tokens each, all different from their first token on."""
    encode = documents.load_encoder(model)
    return [list(document.prompt[:700]) for document in documents.choose(encode, 12, 128)]


@pytest.fixture(scope="session", autouse=True)
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The runtime directory of all wells here, so that what they leave in it can be seen."""
    base = tmp_path_factory.mktemp("run")
    base.chmod(0o700)
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_RUNTIME_DIR", str(base))
    patch.delenv("STEPWELL_HOME", raising=False)
    patch.delenv("VLLM_LOGGING_LEVEL", raising=False)  # these tests read what the engine logs
    yield base / "stepwell"
    patch.undo()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A module's folder: home of its well, and the logs of its engines."""
    return tmp_path_factory.mktemp(request.module.__name__.rpartition(".")[2])


@pytest.fixture(scope="module")
def well(folder: Path, runtime: Path) -> Iterator[Well]:
    """The module's well; an engine starts it. Whatever its tests did, nothing may be left of it when they are done."""
    before = shared_memory()
    well = Well(folder / "home")
    yield well
    well.stop()
    eventually(lambda: shared_memory() <= before, "shared memory is as it was")
    eventually(lambda: well.processes() == [], "the well's process has ended")
    assert names(well.home) <= {
        "keyring",
        "README.txt",
        "stepwell.log",
        "fingerprints.json",
        "disks.json",
        "costs.json",
        "well.lock",
        "paused.json",
    }
    assert all(name.endswith(".lock") for name in names(runtime))


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} if directory.is_dir() else set()
