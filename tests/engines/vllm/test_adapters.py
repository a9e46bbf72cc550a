"""Adapters by the content of their files: known, or bypassed. With vLLM's own request objects; the engine that loads
them for real is in tests/e2e/test_adapters.py."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="the adapter needs the engine")

from vllm.config.lora import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore

from stepwell.client.fingerprint import fingerprint
from stepwell.engines.common import adapters as module
from stepwell.engines.common.adapters import MAX_ADAPTERS, Adapter, Adapters, Unread, Unusable
from stepwell.engines.vllm.identity.adapters import lora_facts, watch_loads
from stepwell.errors import StepwellError

from .local import engine, prompt

SETTLED = 0.15  # seconds after which a file's time is no longer that of now


def make(folder: Path, content: bytes = b"one") -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_bytes(b'{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def read(files: Any, over: Any) -> bytes:
    return fingerprint(files, None)


@pytest.fixture(autouse=True)
def proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the tests run, times say whether a file has changed."""
    monkeypatch.setattr(module, "unstamped", lambda path, table: "")


def settled() -> None:
    time.sleep(SETTLED)


def lora(folder: Path | str, name: str = "n", number: int = 1, **fields: Any) -> LoRARequest:
    return LoRARequest(name, number, str(folder), **fields)


@pytest.fixture
def told() -> list[StepwellError]:
    return []


@pytest.fixture
def ripe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files may be as young as they are: what is tried here is something else."""
    monkeypatch.setattr(module, "_SLACK_NS", 0)


@pytest.fixture
def known(told: list[StepwellError]) -> Iterator[Adapters]:
    """Reads where it is asked, without a process of its own."""
    adapters = Adapters({}, None, told.append, read=read, threaded=False)
    yield adapters
    adapters.close()


def digest(found: object) -> bytes:
    assert isinstance(found, Adapter), found
    return found.digest


def unusable(found: object, why: str) -> None:
    assert isinstance(found, Unusable) and why in found.reason, found


def test_the_digest_is_of_the_content_and_of_nothing_else(known: Adapters, tmp_path: Path) -> None:
    one, two = make(tmp_path / "one"), make(tmp_path / "two", b"two")
    again = Path(shutil.copytree(one, tmp_path / "again"))
    (again / "README.md").write_text("not read")
    (again / "optimizer.pt").write_text("nor this")
    settled()
    first = digest(known.of(lora(one)))
    assert digest(known.of(lora(one))) == digest(known.of(lora(again, "other", 7))) == first
    assert digest(known.of(lora(two, "two", 2))) != first
    assert digest(known.of(lora(one, "form", 3, is_3d_lora_weight=True))) != first
    other = Adapters({"lora.dtype": "x"}, None, print, read=read, threaded=False)
    assert digest(other.of(lora(one))) != first, "the engine's settings are part of it"
    (again / "adapter_config.json").write_bytes(b'{"r": 9}')
    settled()
    assert digest(other.of(lora(again, "c", 9))) != digest(other.of(lora(one)))
    other.close()


@pytest.mark.parametrize(
    "change",
    ["write", "same bytes", "replace", "add", "remove", "link", "link and back", "folder", "old times"],
)
def test_what_changes_is_bypassed_until_the_engine_ends(
    known: Adapters, told: list[StepwellError], tmp_path: Path, change: str
) -> None:
    one, link = make(tmp_path / "one"), tmp_path / "link"
    make(tmp_path / "two")
    link.symlink_to(one)
    settled()
    found = known.of(lora(link))
    assert isinstance(found, Adapter) and known.holds(found)
    weights, config = one / "adapter_model.safetensors", one / "adapter_config.json"
    times = weights.stat()
    match change:
        case "write":
            weights.write_bytes(b"ONE")
        case "same bytes":
            weights.write_bytes(b"one")
        case "replace":
            (tmp_path / "new").write_bytes(b"one")
            os.replace(tmp_path / "new", weights)
        case "add":
            (one / "adapter_model.bin").write_bytes(b"more")
        case "remove":
            config.unlink()
        case "link":
            link.unlink()
            link.symlink_to(tmp_path / "two")
        case "link and back":  # the engine may have loaded it again meanwhile
            for target in (tmp_path / "two", one):
                link.unlink()
                link.symlink_to(target)
        case "folder":
            shutil.move(one, tmp_path / "away")
            shutil.move(tmp_path / "two", one)
        case "old times":
            weights.write_bytes(b"ONE")
            os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert not known.holds(found), "what it computed is not spilled"
    unusable(known.of(lora(link)), "changed under the running engine")
    shutil.rmtree(one, ignore_errors=True)
    if not one.exists():
        make(one)
    settled()
    unusable(known.of(lora(link)), "changed")
    assert [error.code for error in told] == ["SW-405"], "once"
    with pytest.raises(StepwellError, match="changed under"):
        raise told[0]


@pytest.mark.parametrize("again", [("n", 1, {}), ("n", 1, {"load_inplace": True}), ("n", 2, {}), ("m", 1, {})], ids=str)
def test_a_name_or_number_that_is_used_again_is_bypassed(known: Adapters, tmp_path: Path, again: Any) -> None:
    """vLLM goes on with pages by name, and with what it has loaded by number."""
    one, two = make(tmp_path / "one"), make(tmp_path / "two", b"two")
    settled()
    found = known.of(lora(one))
    assert isinstance(found, Adapter)
    name, number, fields = again
    known.loading(lora(two, name, number, **fields))
    assert not known.holds(found)
    unusable(known.of(lora(two, name, number)), "used for another one")
    unusable(known.of(lora(one)), "used for another one")
    assert isinstance(known.of(lora(two, "third", 3)), Adapter), "as any new one"


def test_files_that_changed_since_it_was_registered_are_not_the_engines(known: Adapters, tmp_path: Path) -> None:
    one = make(tmp_path / "one")
    settled()
    known.loading(lora(one))
    (one / "adapter_model.safetensors").write_bytes(b"two")
    settled()
    unusable(known.of(lora(one)), "changed")
    unusable(known.of(lora(one, "n", 5)), "changed")
    assert isinstance(known.of(lora(one, "new", 6)), Adapter), "which the engine has not loaded under any old name"


@pytest.mark.parametrize(
    ("make_it", "why"),
    [
        (lambda at: at / "none", "not a local folder"),
        (lambda at: "org/adapter", "not a local folder"),
        (lambda at: at, "no adapter_config.json"),
        (lambda at: make(at / "fresh"), "changed at this moment"),
    ],
)
def test_what_cannot_be_followed_is_bypassed(known: Adapters, tmp_path: Path, make_it: Any, why: str) -> None:
    unusable(known.of(lora(make_it(tmp_path))), why)


@pytest.mark.parametrize("kind", ["nfs4", "fuse.something", "virtiofs"])
def test_filesystems_of_others_are_bypassed(known: Adapters, tmp_path: Path, kind: str) -> None:
    one = make(tmp_path / "one")
    settled()
    with patch.object(module, "unstamped", lambda path, table: kind):
        unusable(known.of(lora(one)), kind)


def test_files_that_change_while_they_are_read_are_not_known(told: list[StepwellError], tmp_path: Path) -> None:
    one = make(tmp_path / "one")
    settled()

    def hurt(files: Any, over: Any) -> bytes:
        made = fingerprint(files, None)
        (one / "adapter_model.safetensors").write_bytes(b"two")
        return made

    unusable(Adapters({}, None, told.append, read=hurt, threaded=False).of(lora(one)), "changed")


def test_it_reads_beside_the_engine_and_never_waits(tmp_path: Path, told: list[StepwellError]) -> None:
    one = make(tmp_path / "one")
    settled()
    adapters = Adapters({}, tmp_path / "cache.json", told.append)
    assert isinstance(adapters.of(lora(one)), Unread)
    deadline = time.monotonic() + 30
    while isinstance(found := adapters.of(lora(one)), Unread):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    plain = Adapters({}, None, told.append, read=read, threaded=False)
    assert digest(found) == digest(plain.of(lora(one)))
    assert adapters._thread is not None
    adapters.close()
    adapters._thread.join(10)
    assert not adapters._thread.is_alive() and told == []


def test_there_is_room_for_so_many(known: Adapters, tmp_path: Path) -> None:
    one = make(tmp_path / "one")
    settled()
    assert isinstance(known.of(lora(one)), Adapter)
    known._names.update({f"x{n}": known._names["n"] for n in range(MAX_ADAPTERS)})
    unusable(known.of(lora(one, "one more", 9)), "too many")
    assert isinstance(known.of(lora(one)), Adapter)


def test_what_there_is_no_room_to_remember_is_believed_of_nobody(known: Adapters, tmp_path: Path, ripe: None) -> None:
    """A number that was not remembered may have been anything's, when it comes with a name that is."""
    one, two = make(tmp_path / "one"), make(tmp_path / "two", b"two")
    found = known.of(lora(one))
    assert isinstance(found, Adapter)
    known._names.update({f"x{n}": known._names["n"] for n in range(MAX_ADAPTERS)})
    unusable(known.of(lora(two, "other", 9)), "too many")
    unusable(known.of(lora(one, "n", 9)), "too many")
    assert 9 not in known._numbers, "nor is it remembered now"
    assert not known.holds(found)
    unusable(known.of(lora(one)), "no room")


@pytest.mark.parametrize("gone", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_without_config_or_weights_is_no_adapter(
    known: Adapters, tmp_path: Path, ripe: None, gone: str
) -> None:
    """Though all that is in it could be read."""
    one = make(tmp_path / "one")
    (one / "other.safetensors").write_bytes(b"weights of something")
    (one / gone).unlink()
    unusable(known.of(lora(one)), "no adapter_config.json with weights")


def test_a_folder_of_too_many_files_is_not_followed(known: Adapters, tmp_path: Path, ripe: None) -> None:
    one = make(tmp_path / "one")
    for n in range(module._MAX_FILES - 2):
        (one / f"{n}.safetensors").touch()
    assert isinstance(known.of(lora(one)), Adapter)
    two = Path(shutil.copytree(one, tmp_path / "two"))
    (two / "more.safetensors").touch()
    unusable(known.of(lora(two, "two", 2)), "too many files")


def test_the_engine_tells_before_it_loads(known: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def add_lora(core: Any, lora_request: Any) -> bool:
        seen.append([*known._numbers])
        return True

    monkeypatch.setattr(EngineCore, "add_lora", add_lora)
    watch_loads()
    watch_loads()
    one = make(tmp_path / "one")
    settled()
    assert EngineCore.add_lora(None, lora(one, number=4))  # type: ignore[arg-type]
    assert seen == [[4]], "known before, once"
    first = known.of(lora(one, number=4))
    assert isinstance(first, Adapter)
    EngineCore.add_lora(None, object())  # type: ignore[arg-type]
    assert not known.holds(first), "in doubt, nothing"


def test_every_setting_of_adapters_is_a_fact_unless_we_know_better() -> None:
    facts = lora_facts(LoRAConfig(max_lora_rank=8, max_loras=2))
    assert facts == lora_facts(LoRAConfig(max_lora_rank=8, max_loras=3, max_cpu_loras=9))
    assert facts != lora_facts(LoRAConfig(max_lora_rank=16))
    assert "lora.target_modules" in facts


# --- through the connector --------------------------------------------------------------------------------------------


def adapted(h: Any, told: list[StepwellError]) -> Adapters:
    """As the connector does where the engine has adapters switched on."""
    made = Adapters({}, None, told.append, read=read, threaded=False)
    h.half.live.adapters = made
    return made


def test_blocks_are_those_of_the_adapter(tmp_path: Path, told: list[StepwellError]) -> None:
    one, two = make(tmp_path / "one"), make(tmp_path / "two", b"two")
    again = Path(shutil.copytree(one, tmp_path / "again"))
    settled()
    with engine(tmp_path) as h:
        adapted(h, told)
        h.serve(prompt(100))
        assert h.recall(prompt(100), lora_request=lora(one, "a", 1)).external == 0, "not the model's own"
        assert h.recall(prompt(100), lora_request=lora(two, "b", 2)).external == 0, "nor another's"
        assert h.recall(prompt(100), lora_request=lora(one, "a", 1)).external == 96
        assert h.recall(prompt(100), lora_request=lora(again, "c", 3)).external == 96, "by content"
        assert h.recall(prompt(100), lora_request=lora(two, "b", 2)).external == 96
        assert h.recall(prompt(100), lora_request=lora(two, "b", 2), salt="s").external == 0
        assert h.recall(prompt(100)).external == 96
        h.assert_quiet()


def test_the_connector_follows_them_where_the_engine_has_them_switched_on(tmp_path: Path) -> None:
    one = make(tmp_path / "one")
    settled()
    reading = patch.object(module, "_fingerprint", lambda files, cache, over: fingerprint(files, None))
    with reading, engine(tmp_path, lora=True) as h:
        h.serve(prompt(100), lora_request=lora(one))
        assert h.recall(prompt(100), lora_request=lora(one)).external == 96
        h.assert_quiet()


def test_an_engine_that_does_not_tell_of_its_adapters_is_served_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make(tmp_path / "one")
    settled()
    monkeypatch.delattr(EngineCore, "add_lora")
    with engine(tmp_path, lora=True) as h:
        assert h.serve(prompt(100), lora_request=lora(one)).external == 0
        assert h.counted("bypassed_adapter") == 1
        h.serve(prompt(100, seed=2))
        assert h.recall(prompt(100, seed=2)).external == 96


def test_an_adapter_whose_files_are_read_bypasses_meanwhile(tmp_path: Path, told: list[StepwellError]) -> None:
    one = make(tmp_path / "one")
    settled()
    with engine(tmp_path) as h:
        made = adapted(h, told)
        made._examine = lambda record: None  # type: ignore[method-assign]
        h.serve(prompt(100), lora_request=lora(one))
        assert (h.counted("bypassed_adapter_unread"), h.stat("blocks")) == (1, 0)
        del made._examine
        made._examine(made._numbers[1])
        h.serve(prompt(100), lora_request=lora(one))
        assert h.recall(prompt(100), lora_request=lora(one)).external == 96


def test_what_was_computed_with_a_changed_adapter_is_not_spilled(tmp_path: Path, told: list[StepwellError]) -> None:
    one = make(tmp_path / "one")
    settled()
    with engine(tmp_path, batch_tokens=64) as h:
        adapted(h, told)
        rid = h.add(prompt(200), lora_request=lora(one))
        while not h.stat("blocks"):
            h.step()
        before = h.stat("blocks")
        (one / "adapter_model.safetensors").write_bytes(b"two")
        h.run()
        assert h.requests[rid].finish_reason == "length"
        assert h.stat("blocks") == before and h.counted("bypassed_adapter") == 1
        h.serve(prompt(200), lora_request=lora(one))
        assert h.counted("bypassed_adapter") == 2
        h.assert_quiet()


def test_what_waits_for_a_recall_goes_without_it(tmp_path: Path, told: list[StepwellError]) -> None:
    one = make(tmp_path / "one")
    settled()
    with engine(tmp_path) as h:
        adapted(h, told)
        h.serve(prompt(100), lora_request=lora(one))
        h.forget()
        rid = h.add(prompt(100), lora_request=lora(one))
        (one / "adapter_model.safetensors").write_bytes(b"two")
        h.run()
        assert h.requests[rid].external == 0
        h.assert_quiet()
