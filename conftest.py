"""Settings for the whole suite."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import Phase, settings

# Random on every run, so that many runs see more than one. A failure prints what repeats it. `make nightly` loads
# "thorough", the mutation check (lab.trust.guards) "mutants": to it all examples that fail are alike, small or not.
settings.register_profile("quick", derandomize=False, print_blob=True, deadline=None, max_examples=40)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=400)
settings.register_profile("mutants", settings.get_profile("thorough"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("quick")


# Hundreds of processes load the package in a run: it is compiled for the first of them alone, whatever the user's
# environment says.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

gc.disable()  # until all is loaded


def pytest_collection_finish() -> None:
    """What the engine and torch have loaded by now stays: no collection of a test looks through it again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Path]:
    """With a shorter path than pytest gives it: a socket's may have 107 bytes, whatever the user's name. Deleted when
    the test has passed: the folders of a whole run have 25 GB, which a disk would have to write."""
    path, failed = tmp_path_factory.mktemp("t"), request.session.testsfailed
    yield path
    if request.session.testsfailed == failed:
        shutil.rmtree(path, ignore_errors=True)


_OURS = str(Path(__file__).parent / "src" / "stepwell") + "/"


def refuse_pickles(event: str, arguments: tuple[object, ...]) -> None:
    """Whatever a test does, nothing is unpickled on behalf of our code. An engine may unpickle for itself, and who runs
    the tests is not at work in them."""
    if event != "pickle.find_class":
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and "/_pytest/" not in frame.f_code.co_filename:
        if frame.f_code.co_filename.startswith(_OURS):
            raise RuntimeError(f"pickle.find_class{arguments} on behalf of {frame.f_code.co_filename}")
        frame = frame.f_back


sys.addaudithook(refuse_pickles)
