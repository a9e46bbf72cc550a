"""Settings that a running well reads again: which they are, that a bad file changes nothing, and what is said of it."""

from __future__ import annotations

import json
import logging
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from deep import DeepRig, chain, fill
from test_clear import invoke
from test_writer import below
from wells import InThread, eventually, home_apart

from stepwell.client import control
from stepwell.config import Settings, Tenant
from stepwell.config.reread import FIXED, LIVE, changed, in_force
from stepwell.errors import ConfigError
from stepwell.protocol import messages as m
from stepwell.serve import process
from stepwell.serve.loop import Loop
from stepwell.serve.reload import ANSWER_SECONDS, MAX_WAITING, Reloading, line
from stepwell.serve.server.admin import Shell
from stepwell.testing.clock import SetClock
from stepwell.testing.executor import SeededExecutor
from stepwell.units import Amount

OTHERS: dict[str, Any] = {
    "recall": "never",
    "placement": "hot",
    "write": "back",
    "prefetch": "on",
    "pin_waiting": 0.25,
    "linger": 1.0,
    "linger_empty": 2.0,
    "log_level": "debug",
}


def test_every_setting_is_taken_over_or_needs_a_restart_and_none_is_both() -> None:
    assert LIVE.keys() | FIXED.keys() == set(Settings.model_fields)
    assert not LIVE.keys() & FIXED.keys()
    assert all([*LIVE.values(), *FIXED.values()])


def test_no_size_is_taken_over() -> None:
    properties = Settings.model_json_schema()["properties"]
    sizes = [name for name, schema in properties.items() if "size" in json.dumps(schema.get("anyOf", schema))]
    assert {"host", "disk_reserve", "disk_queue"} <= set(sizes)
    assert not {name for name in LIVE if "size" in json.dumps(properties[name])}


def test_what_is_taken_over_is_that_and_no_more() -> None:
    assert OTHERS.keys() == LIVE.keys()
    running = Settings()
    wanted = Settings(**OTHERS, host=Amount(size=1 << 30), disk_threads=9)
    now = in_force(running, wanted)
    assert {name: getattr(now, name) for name in LIVE} == OTHERS
    assert {name for name in FIXED if getattr(now, name) != getattr(running, name)} == set()
    assert changed(running, now).keys() == LIVE.keys()
    assert changed(now, wanted) == {"host": ("unset", "1GiB"), "disk_threads": ("4", "9")}


class Reader:
    """A reloading whose settings are `wanted`, or the error in its place. `live`: what was applied, in order."""

    def __init__(self, *idle: str) -> None:
        self.wanted: Settings | Exception = Settings()
        self.reads = 0
        self.live: list[Settings] = []
        self.answers: list[m.Message] = []
        self.executor = SeededExecutor(1)
        self.clock = SetClock()
        self.reloading = Reloading(Settings(), self._read, self.live.append, self.executor, self.clock, idle)

    def _read(self) -> Settings:
        self.reads += 1
        if isinstance(self.wanted, Exception):
            raise self.wanted
        return self.wanted

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.reloading.keep_time(self.clock.now())

    def ask(self) -> m.Message:
        self.reloading.begin(self.answers.append)
        self.executor.drain()
        return self.answers[-1]


def test_what_changed_and_what_needs_a_restart_is_said_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    reader = Reader()
    reader.wanted = Settings(
        recall="never", host=Amount(size=1 << 30), tenants={"secret": Tenant(uids=(7,))}, socket=Path("/x/y")
    )
    with caplog.at_level(logging.INFO):
        answer = reader.ask()
    assert answer == m.Reloaded([("recall", "auto", "never")], ["host", "socket", "tenants"])
    (record,) = caplog.records
    assert record.getMessage() == (
        "settings read again: recall = never (was auto); a restart of the well is needed for host, socket, tenants"
    )
    assert reader.live[-1].host is None and reader.live[-1].recall == "never"
    assert reader.ask() == m.Reloaded([], ["host", "socket", "tenants"]), "it still is"
    assert line([], []) == "settings read again: nothing has changed"


def test_each_change_is_in_the_log_however_soon_it_comes_after_another(caplog: pytest.LogCaptureFixture) -> None:
    reader = Reader()
    with caplog.at_level(logging.INFO):
        for recall in ("never", "auto", "always"):
            reader.wanted = Settings(recall=recall)
            for _ in range(3):
                reader.ask()
    told = [record.getMessage() for record in caplog.records if "recall = " in record.getMessage()]
    assert [text.split()[5] for text in told] == ["never", "auto", "always"]
    assert len(caplog.records) < 9, "what has not changed is said now and then"


def test_a_bad_file_changes_nothing_and_says_what_why_and_how_to_fix_it(caplog: pytest.LogCaptureFixture) -> None:
    reader = Reader()
    reader.wanted = ConfigError("SW-101", what="stepwell.yaml:2: recal is not a setting", why="a reason", fix="a fix")
    with caplog.at_level(logging.INFO):
        answer = reader.ask()
    assert answer == m.Refused(
        "SW-101", "nothing has changed: stepwell.yaml:2: recal is not a setting", "a reason", "a fix"
    )
    assert not reader.live and "recal is not a setting" in caplog.text and "SW-101" in caplog.text
    reader.wanted = Settings(recall="never")
    assert isinstance(reader.ask(), m.Reloaded), "and the next one can be right"


def test_settings_that_contradict_each_other_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The log tells no tenant's name, whoever asks is told."""
    reader = Reader()
    reader.wanted = Settings(recall="never", tenants={"secret": Tenant()})
    answer = reader.ask()
    assert isinstance(answer, m.Refused) and "secret" in answer.what
    assert not reader.live and "SW-102" in caplog.text and "secret" not in caplog.text


def test_what_a_well_cannot_foresee_is_no_end_of_it() -> None:
    reader = Reader()
    reader.wanted = RuntimeError("home is on fire")
    answer = reader.ask()
    assert isinstance(answer, m.Refused) and "home is on fire" in answer.why
    assert not reader.live


def test_while_settings_are_read_who_asks_gets_what_is_read_afterwards() -> None:
    """At most one read is under way, however often it is asked for, and whoever asks last sees the last file."""
    reader = Reader()
    for _ in range(5):
        reader.reloading.begin(reader.answers.append)
    assert reader.executor.pending == 1
    reader.executor.drain()
    assert reader.reads == 2
    assert len(reader.answers) == 5


def late(message: m.Message) -> bool:
    return isinstance(message, m.Refused) and message.code == "SW-513" and "nothing has changed" in message.what


def test_a_read_that_hangs_is_answered_in_time_and_changes_nothing_later(caplog: pytest.LogCaptureFixture) -> None:
    reader = Reader()
    reader.wanted = Settings(recall="never")
    assert reader.reloading.next_moment is None
    for _ in range(2):
        reader.reloading.begin(reader.answers.append)
    assert reader.reloading.next_moment == ANSWER_SECONDS
    with caplog.at_level(logging.INFO):
        reader.pass_time(ANSWER_SECONDS - 1)
        assert not reader.answers
        reader.pass_time(1)
        assert len(reader.answers) == 2 and all(map(late, reader.answers)), "who waits for the next read as well"
        assert reader.reloading.next_moment is None
        reader.pass_time(0)
        for _ in range(100):
            reader.reloading.begin(reader.answers.append)
        assert len(reader.answers) == 102 and all(map(late, reader.answers)), "at once"
        assert [record.getMessage().count("SW-513") for record in caplog.records] == [1], "once"
        reader.executor.drain()
    assert reader.reads == 1 and not reader.live, "what was answered stays true"
    assert isinstance(reader.ask(), m.Reloaded) and reader.live[-1].recall == "never"
    assert len(reader.answers) == 103


def test_so_many_answers_wait_for_the_next_read_and_no_more() -> None:
    reader = Reader()
    for _ in range(1 + MAX_WAITING + 3):
        reader.reloading.begin(reader.answers.append)
    assert len(reader.answers) == 3 and all(map(late, reader.answers))
    reader.executor.drain()
    assert reader.reads == 2
    assert sum(isinstance(answer, m.Reloaded) for answer in reader.answers) == 1 + MAX_WAITING


def test_reloads_without_end_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    reader = Reader()
    with caplog.at_level(logging.INFO):
        for wanted in (Settings(), ConfigError("SW-101", what="w", why="y", fix="f"), RuntimeError("r")):
            reader.wanted = wanted
            for _ in range(20):
                reader.ask()
        assert len(caplog.records) == 3
        reader.pass_time(60)
        reader.ask()
    assert "19 like it not shown" in caplog.text


def test_what_means_nothing_to_this_well_is_not_said_to_be_in_force() -> None:
    reader = Reader("linger")
    reader.wanted = Settings(linger=1.0, recall="never")
    assert reader.ask() == m.Reloaded([("recall", "auto", "never")], [])


def test_the_loop_wakes_for_a_read_that_hangs(tmp_path: Path) -> None:
    moments: list[float] = []
    shell = Shell(lambda: True, lambda answer: None, moments.append, lambda: 0.0 if len(moments) < 50 else None)
    well = InThread(tmp_path, shell=shell)
    try:
        eventually(lambda: len(moments) >= 50)
    finally:
        well.close()


# in force at once -----------------------------------------------------------------------------------------------------


def follow(rig: DeepRig, **changes: Any) -> None:
    settings = Settings(**changes)
    rig.hierarchy.follow(process.options(settings))


@pytest.mark.parametrize(("asked", "found"), [({"recall": "never"}, 0), ({"pin_waiting": 0.001}, 1)])
def test_recall_and_pin_waiting_are_asked_for_each_request(asked: dict[str, Any], found: int) -> None:
    rig = DeepRig(3)
    engine, digests = rig.join(), chain(3)
    fill(engine, digests)
    rig.settle()
    follow(rig, **asked)
    assert engine.found(digests) == found
    if asked.get("recall") == "never":
        for word, blocks in (("auto", 3), ("default", 3), ("nonsense", 0)):  # `default`: of the version before
            ticket = engine.ask(digests, recall=word)
            rig.settle()
            assert len(engine.answer(ticket).refs) == blocks
    follow(rig)
    assert engine.found(digests) == 3


def test_write_is_asked_for_each_block() -> None:
    """And what is written brings along what the policy before has left."""
    rig = DeepRig(3)
    follow(rig, write="second_touch")
    engine, digests = rig.join(), chain(4)
    fill(engine, digests[:64])
    rig.settle()
    assert not below(rig, engine, digests)
    follow(rig)
    fill(engine, digests[64:], parent=digests[32:64])
    rig.settle()
    assert below(rig, engine, digests) == [0, 1, 2, 3]


def test_placement_is_asked_for_each_block() -> None:
    rig = DeepRig(3)
    follow(rig, placement="warm")
    engine = rig.join()
    fill(engine, chain(1))
    rig.settle()
    assert [entry.history.passing for entry in rig.hierarchy.index.values()] == [True]


def test_prefetch_begins_and_ends() -> None:
    rig = DeepRig(3)
    assert rig.hierarchy.migration.prefetch is None
    follow(rig, prefetch="on")
    first = rig.hierarchy.migration.prefetch
    follow(rig, prefetch="on")
    assert first is not None and rig.hierarchy.migration.prefetch is first, "it remembers"
    follow(rig)
    assert rig.hierarchy.migration.prefetch is None
    engine, digests = rig.join(), chain(3)
    fill(engine, digests)
    assert engine.found(digests) == 3


# signals and the command ----------------------------------------------------------------------------------------------


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with home_apart(monkeypatch) as home:
        yield home


def test_a_real_well_reads_its_settings_again_when_it_is_told_to(home: Path, tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("host: 64MiB\nlog_level: warning\nrecall: default\n")
    command = [sys.executable, "-m", "stepwell", "serve", "--home", str(home), "--config", str(settings)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and "serving" in process.stdout.readline()
        log = home / "stepwell.log"
        try:
            eventually(lambda: f"{settings}:3: recall: `default` is `auto` now" in log.read_text())
            settings.write_text("host: 65MiB\nrecall: never\n")
            process.send_signal(signal.SIGHUP)
            said = "settings read again: recall = never (was auto), log_level = info (was warning); a restart of the"
            eventually(lambda: said in log.read_text())
            settings.write_text("host: 65MiB\nrecal: never\n")
            process.send_signal(signal.SIGHUP)
            eventually(lambda: log.read_text().count("did you mean recall") == 1)
            code, text = invoke("reload", "--home", str(home))
            assert code == 1 and "SW-101" in text and "did you mean recall" in text and "nothing has changed" in text
            settings.unlink()
            os.mkfifo(settings)
            code, text = invoke("reload", "--home", str(home))
            assert code == 1 and "SW-103" in text and "a pipe" in text, "it waits for no pipe"
            settings.unlink()
            settings.write_text("host: 65MiB\nlinger: 5m\n")
            code, text = invoke("reload", "--home", str(home), "--json")
            assert (code, json.loads(text)["restart"]) == (0, ["host"])
            assert {change["name"] for change in json.loads(text)["live"]} == {"recall"}
        finally:
            control.stop(home)


def loop_of_signals() -> tuple[Loop, list[str]]:
    heard: list[str] = []
    loop = SimpleNamespace(stop=heard.append, reload=lambda: heard.append("reload"))
    return cast(Loop, loop), heard


def test_a_terminal_that_is_closed_ends_the_well_that_was_started_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, terminal = pty.openpty()
    loop, heard = loop_of_signals()
    saved = os.dup(0)
    try:
        os.dup2(terminal, 0)
        monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)  # whatever these tests run under
        hung_up = process._hang_up(loop)
        monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)
        with_nohup = process._hang_up(loop)
        hung_up(signal.SIGHUP, None)
        assert heard == ["reload"], "somebody has sent it"
        os.close(ours)
        eventually(lambda: not os.isatty(terminal))  # a process that another thread starts has it too, for a moment
        hung_up(signal.SIGHUP, None)
        with_nohup(signal.SIGHUP, None)
        assert heard == ["reload", "its terminal was closed", "reload"]
    finally:
        os.dup2(saved, 0)
        os.close(saved)
        os.close(terminal)
