"""Settings: every source, its order and origin; whatever is not understood is an error that names its place."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from stepwell.cli.commands import app
from stepwell.config import DiskPlace, Loaded, Settings, check_host, check_together, load, queue_bytes, texts
from stepwell.config.document import SettingEntry, parse
from stepwell.config.listen import parse_listen, split_listen
from stepwell.config.loader import from_env, from_overrides, merge
from stepwell.config.places import parse_places
from stepwell.errors import ConfigError
from stepwell.serve.options import judge
from stepwell.units import Amount, parse_amount


class Inner(pydantic.BaseModel):
    size: int = 1
    names: list[str] = []


class Nested(pydantic.BaseModel):
    """What later settings will look like: a group of settings, with a list in it."""

    top: int = 0
    inner: Inner = Inner()


def nested(raw: bytes) -> Loaded[Nested]:
    return merge(Nested, parse(raw, "f.yaml"))


def refused(code: str, *shown: str, raw: bytes | None = None, **arguments: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        if raw is not None:
            merge(Settings, parse(raw, "f.yaml"))
        else:
            load(**arguments)  # type: ignore[arg-type]
    assert caught.value.code == code, caught.value
    for part in shown:
        assert part in str(caught.value)
    assert caught.value.fix
    return caught.value


def test_defaults(tmp_path: Path) -> None:
    loaded = load(tmp_path, {})
    assert loaded.settings.model_dump() == {
        "host": None,
        "disk": [],
        "disk_reserve": "5%",
        "disk_queue": None,
        "disk_threads": 4,
        "recall": "auto",
        "policy": "auto",
        "placement": "by_worth",
        "write": "through",
        "prefetch": "off",
        "seal": "aes-256-gcm",
        "linger": 600.0,
        "linger_empty": 60.0,
        "log_level": "info",
        "log_format": "text",
        "metrics": None,
        "pin_waiting": 0.5,
        "socket": None,
        "allow_uids": [],
        "tenants": {},
    }
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.origins.keys() == loaded.settings.model_dump().keys()


def test_later_sources_win_and_each_value_knows_its_own(tmp_path: Path) -> None:
    file = tmp_path / "stepwell.yaml"
    file.write_text("# a well\nhost: 1GiB\nlinger: 5m\nlinger_empty: 1\npin_waiting: 0.75\n")
    env = {"STEPWELL_LINGER": "6m", "STEPWELL_LINGER_EMPTY": "2s", "STEPWELL_HOME": "/h", "HOME": "/x", "STEPWELLX": ""}
    loaded = load(tmp_path, env, overrides={"linger_empty": 3, "log_level": None})
    assert loaded.settings == Settings(host="1GiB", linger=360, linger_empty=3, pin_waiting=0.75)  # type: ignore[arg-type]
    assert {name: origin for name, origin in loaded.origins.items() if origin != "default"} == {
        "host": f"{file}:2",
        "linger": "env STEPWELL_LINGER",
        "linger_empty": "--linger_empty",
        "pin_waiting": f"{file}:5",
    }


def test_which_file_is_read(tmp_path: Path) -> None:
    sizes = {"stepwell.yaml": 1, "env.yaml": 2, "named.yaml": 3}
    for name, size in sizes.items():
        (tmp_path / name).write_text(f"host: {size}GiB")
    env = {"STEPWELL_CONFIG": str(tmp_path / "env.yaml")}
    assert load(tmp_path, {}).settings.host == Amount(size=1 << 30)
    assert load(tmp_path, env).settings.host == Amount(size=2 << 30)
    assert load(tmp_path, env, path=tmp_path / "named.yaml").settings.host == Amount(size=3 << 30)
    assert load(tmp_path / "other", {"STEPWELL_CONFIG": ""}).settings.host is None


def test_a_named_file_must_be_readable(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    refused("SW-103", str(missing), "No such file", home=tmp_path, env={}, path=missing)
    refused("SW-103", str(missing), home=tmp_path, env={"STEPWELL_CONFIG": str(missing)})
    refused("SW-103", "directory", home=tmp_path, env={}, path=tmp_path)
    os.mkfifo(pipe := tmp_path / "pipe")
    refused("SW-103", "a pipe", home=tmp_path, env={}, path=pipe)
    refused("SW-103", home=tmp_path, env={"STEPWELL_CONFIG": "a\0b"})
    (tmp_path / "stepwell.yaml").mkdir()
    refused("SW-103", "directory", home=tmp_path, env={})


def test_an_unknown_key_is_refused_with_its_line_and_the_closest_name(tmp_path: Path) -> None:
    (tmp_path / "stepwell.yaml").write_text("linger: 5m\n\nhots: 4GiB\n")
    error = refused("SW-101", home=tmp_path, env={})
    assert error.what == f"{tmp_path}/stepwell.yaml:3: hots is not a setting; did you mean host?"
    assert "linger_empty" in error.fix
    error = refused("SW-101", raw=b"host:\n  size: 1\n")
    assert error.what.startswith("f.yaml:2: host.size is not a setting")
    error = refused("SW-101", home=tmp_path / "x", env={}, overrides={"pin": 1, "host": "1G"})
    assert error.what.startswith("--pin: pin is not a setting")


def test_names_within_a_value_are_refused_with_what_the_value_is(tmp_path: Path) -> None:
    error = refused("SW-101", raw=b"disk: {path: /a, size: 1GiB}")
    assert "did you mean" not in error.what and error.fix == "write disk itself (list of PATH:SIZE)"
    error = refused("SW-104", home=tmp_path, env={"STEPWELL_HOST__SIZE": "1G"})
    assert error.fix == "write host itself (size or per cent)"


def test_an_unknown_variable_is_refused_with_the_closest_name(tmp_path: Path) -> None:
    error = refused("SW-104", home=tmp_path, env={"STEPWELL_HOTS": "4GiB"})
    assert error.what == "STEPWELL_HOTS is not a setting; did you mean STEPWELL_HOST?"
    refused("SW-104", home=tmp_path, env={"STEPWELL_": ""})


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("host: 4 bananas", "'4 bananas' is not a size"),
        ("host: 0", "'0' is not a size"),
        ("host: [1]", "list is not a size"),
        ("linger: soon", "'soon' is not a duration"),
        ("linger: -1", "'-1' is not a duration"),
        ("log_level: loud", "debug"),
        ("pin_waiting: 0", "greater than 0"),
        ("pin_waiting: 1.01", "less than or equal to 1"),
        ("pin_waiting: nan", "finite"),
        ("pin_waiting:", "number"),
        ("host: 101%", "'101%' is not a per cent"),
        ("host: 0%", "'0%' is not a per cent"),
        ("disk_reserve:", "NoneType is not a size"),
        ("disk_queue: 5%", "'5%' is not a size"),
        ("disk_threads: 0", "greater than or equal to 1"),
        ("disk_threads: 65", "less than or equal to 64"),
        ("disk_threads: 4.5", "(whole number from 1 to 64)"),
        ("pin_waiting: much", "valid number fix: correct the value (number over 0 and at most 1)"),
        ("log_level: 7", "(one of `debug`, `info`, `warning`, `error`)"),
        ("seal: rot13", "aes-256-gcm"),
        ("log_format: xml", "json"),
        ("disk: here:1GiB", "'here' is not an absolute path"),
        ("disk: /a:lots", "'lots' is not a size"),
        ("disk: /a:0%", "'0%' is not a per cent"),
        ("disk: '/a,'", "'' is not an absolute path"),
        ("disk: /a:1G,/b/../a", "given twice"),
        ("disk: [/a, '/a/']", "given twice"),
        ("disk: [/a: 1G]", "is no directory with a size"),
        ("disk: '~nobody-of-this-name/a'", "is not an absolute path"),
        ('disk: "/a\\0b"', "is not an absolute path"),
        ("disk:", "NoneType is no list"),
        ("metrics: 0.0.0.0:9100", "is not a loopback address"),
        ("metrics: '[::]:9100'", "is not a loopback address"),
        ("metrics: example.org:9100", "is not a loopback address"),
        ("metrics: 10.0.0.1:9100", "is not a loopback address"),
        ("metrics: ':9100'", "is not an address with a port"),
        ("metrics: localhost", "is not an address with a port"),
        ("metrics: localhost:0", "is not an address with a port"),
        ("metrics: 127.0.0.1:65536", "is not an address with a port"),
        ("metrics: relative/socket", "is not an address with a port"),
        ('metrics: "/a\\0b"', "NUL"),
        ("metrics: [9100]", "list is not an address"),
        (f"metrics: /{'x' * 107}", "107 bytes"),
    ],
)
def test_a_bad_value_is_refused_with_its_place_and_reason(line: str, why: str) -> None:
    refused("SW-102", f"f.yaml:2: {line.split(':')[0]} cannot be used", why, raw=f"# note\n{line}".encode())


def test_a_bad_value_names_the_source_that_won(tmp_path: Path) -> None:
    (tmp_path / "stepwell.yaml").write_text("host: 1GiB")
    refused("SW-102", "env STEPWELL_HOST: host", home=tmp_path, env={"STEPWELL_HOST": ""})
    error = refused("SW-102", home=tmp_path, env={"STEPWELL_HOST": "4 bananas"})
    assert (error.why, "64GiB" in error.fix) == ("'4 bananas' is not a size", True)
    refused("SW-102", "--host: host", home=tmp_path, env={}, overrides={"host": -1})
    refused("SW-102", "flags: host", home=tmp_path, env={}, overrides={"host": -1}, origin="flags")


def test_scalars_are_text_and_mean_what_is_written() -> None:
    """YAML 1.1 would read an octal number and a number to base sixty."""
    assert parse(b"a: 0100\nb: 1:30\nc: no\nd: 2026-01-01\ne: ~\nf:\ng: 'null'\n", "f") == [
        SettingEntry(("a",), "0100", "f:1"),
        SettingEntry(("b",), "1:30", "f:2"),
        SettingEntry(("c",), "no", "f:3"),
        SettingEntry(("d",), "2026-01-01", "f:4"),
        SettingEntry(("e",), None, "f:5"),
        SettingEntry(("f",), None, "f:6"),
        SettingEntry(("g",), "null", "f:7"),
    ]


@pytest.mark.parametrize("raw", [b"", b"# nothing\n", b"---\n", b"null", b"{}", b"\xef\xbb\xbfhost:\n"])
def test_an_empty_file_sets_nothing(raw: bytes) -> None:
    assert merge(Settings, parse(raw, "f.yaml")).settings == Settings()


@pytest.mark.parametrize(
    ("raw", "place"),
    [
        (b"- host\n", "f.yaml:1:"),
        (b"host", "f.yaml:1:"),
        (b"a: 1\nhost: 1G\nhost: 2G\n", "f.yaml:3:"),
        (b"a: {b: 1,\n b: 2}", "f.yaml:2:"),
        (b"host: [1\n", "f.yaml:2:"),
        (b"a: b: c\n", "f.yaml:1:"),
        (b"host: 1\n---\nhost: 2\n", "f.yaml:2:"),
        (b"a: &x 1\nhost: *x\n", "f.yaml:2:"),
        (b"a: &x [*x]\n", "f.yaml:1:"),
        (b"\nhost: !!python/object/apply:os.getcwd []\n", "f.yaml:2:"),
        (b"host: [!!python/name:os.getcwd ]\n", "f.yaml:1:"),
        (b"a: !!set {b}\n", "f.yaml:1:"),
        (b"[a]: 1\n", "f.yaml:1:"),
        (b"a: 1\n? \n", "f.yaml:2:"),
        (b"!!int a: 1\n", "f.yaml:1:"),
        (b"a: 1\nb: \xff\n", "f.yaml:2:"),
        (b"a: \0\n", "f.yaml"),
        (b'a: "\\UFFFFFFFF"\n', "f.yaml"),
        (b'a: "\\U00110000"\n', "f.yaml"),
        (b"[" * 5000, "f.yaml"),
    ],
)
def test_what_is_not_one_mapping_of_plain_values_is_refused(raw: bytes, place: str) -> None:
    error = refused("SW-105", raw=raw)
    assert error.what.startswith(place)


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "stepwell.yaml").write_bytes(b"#" * (1 << 20) + b"\n")
    refused("SW-105", "1 MiB", home=tmp_path, env={})


def test_groups_of_settings() -> None:
    loaded = nested(b"top: 3\ninner:\n  size: 4\n  names: [a, 7]\n")
    assert loaded.settings == Nested(top=3, inner=Inner(size=4, names=["a", "7"]))
    assert loaded.origins == {"top": "f.yaml:1", "inner.size": "f.yaml:3", "inner.names": "f.yaml:4"}
    assert nested(b"inner:\n").settings == Nested()
    entries = [*from_env({"STEPWELL_INNER__SIZE": "5"}), *from_overrides({"inner.names": ["b"]})]
    assert merge(Nested, entries).settings.inner == Inner(size=5, names=["b"])
    for raw, what in (
        (b"inner: 5", "f.yaml:1: inner is a group of settings"),
        (b"inner: {size: x}", "f.yaml:1: inner.size cannot be used"),
        (b"inner: {names: [a, {b: 1}]}", "f.yaml:1: inner.names.1 cannot be used"),
        (b"inner:\n  sise: 1", "f.yaml:2: inner.sise is not a setting; did you mean inner.size?"),
    ):
        with pytest.raises(ConfigError) as caught:
            nested(raw)
        assert caught.value.what == what
    with pytest.raises(ConfigError) as caught:
        merge(Nested, from_env({"STEPWELL_INNER__SISE": "1"}))
    assert caught.value.what == "STEPWELL_INNER__SISE is not a setting; did you mean STEPWELL_INNER__SIZE?"


def test_settings_and_origins_cannot_be_changed(tmp_path: Path) -> None:
    loaded = load(tmp_path, {})
    with pytest.raises(pydantic.ValidationError):
        loaded.settings.host = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        loaded.origins["host"] = "nowhere"  # type: ignore[index]
    with pytest.raises(pydantic.ValidationError):
        Settings(hots=1)  # type: ignore[call-arg]


SOME_YAML = st.text(st.sampled_from("host: linger\n \t-[]{}&*!?|>'\"%@#,0123\\Ux~\0é"), max_size=60).map(str.encode)


@given(SOME_YAML | st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace")))
def test_any_file_is_settings_or_a_config_error(raw: bytes) -> None:
    try:
        merge(Settings, parse(raw, "f.yaml"))
    except ConfigError as error:
        assert "\n" not in str(error)


@given(st.dictionaries(st.text(max_size=8).map("STEPWELL_".__add__) | st.just("STEPWELL_HOST"), st.text(max_size=20)))
def test_any_environment_is_settings_or_a_config_error(env: dict[str, str]) -> None:
    try:
        merge(Settings, from_env(env))
    except ConfigError as error:
        assert error.code in ("SW-102", "SW-104")


def test_sizes_that_cannot_work_are_refused() -> None:
    gib = 1 << 30
    check_host(gib, gib)
    with pytest.raises(ConfigError) as caught:
        check_host(gib, gib - 1)
    assert caught.value.code == "SW-106"
    assert "1023MiB" in caught.value.fix
    check_host(64 << 20, gib)
    with pytest.raises(ConfigError) as caught:
        check_host((64 << 20) - 1, gib)
    assert caught.value.code == "SW-107"
    assert "64MiB" in caught.value.fix
    check_host(16 << 20, gib, minimum=16 << 20)


def test_the_write_queue_is_a_part_of_the_arena_unless_it_is_set() -> None:
    assert queue_bytes(Settings(), 1 << 30) == 128 << 20
    assert queue_bytes(Settings(), 1 << 40) == 1 << 30
    assert queue_bytes(Settings(disk_queue=5), 1 << 40) == 5


@pytest.mark.parametrize(
    ("settings", "code", "fix"),
    [
        ({"allow_uids": "7,8"}, "SW-102", "set socket too"),
        ({"disk": "/a:1GiB", "disk_reserve": "100%"}, "SW-114", "lower disk_reserve (5% unless it is set)"),
        ({"disk": "/a:96%"}, "SW-114", "or the size to at most 95%"),
        ({"disk": "/a:50%,/b", "disk_reserve": "50.5%"}, "SW-114", "or the size to at most 49.5%"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, str], code: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_together(Settings.model_validate(settings))
    assert caught.value.code == code and fix in caught.value.fix


def test_settings_that_fit_are_not() -> None:
    for settings in ({}, {"allow_uids": "7", "socket": "/s"}, {"disk_reserve": "100%"}, {"disk": "/a:95%,/b:95%"}):
        check_together(Settings.model_validate(settings))


PLACES = (DiskPlace(Path("/a"), parse_amount("2TB")), DiskPlace(Path("/b c"), parse_amount("50%")))


@pytest.mark.parametrize(
    "raw",
    [b"disk: [ '/a:2TB', /b c ]", b"disk: /a:2TB, /b c", b"disk:\n- /a:2000GB\n- /b c:50%", b"disk: '/a:2TB,/b c'"],
)
def test_directories_come_as_a_list_or_as_one_text(raw: bytes) -> None:
    assert merge(Settings, parse(raw, "f.yaml")).settings.disk == PLACES


def test_directories_from_each_source_and_back(tmp_path: Path) -> None:
    text = ",".join(map(str, PLACES))
    assert text == "/a:2000000000000,/b c:50%"
    assert load(tmp_path, {"STEPWELL_DISK": text}).settings.disk == PLACES
    assert load(tmp_path, {}, overrides={"disk": text}).settings.disk == PLACES
    assert load(tmp_path, {}, overrides={"disk": PLACES}).settings.disk == PLACES
    assert load(tmp_path, {"STEPWELL_DISK": "/x"}, overrides={"disk": []}).settings.disk == ()
    assert Settings(disk=text).model_dump(mode="json")["disk"] == text.split(",")  # type: ignore[arg-type]


def test_what_a_directory_may_be_called() -> None:
    home = Path.home()
    assert parse_places("~/kv") == (DiskPlace(home / "kv"),)
    assert parse_places(["/a,b:1G", "/c:d:25%"]) == (
        DiskPlace(Path("/a,b"), Amount(size=1 << 30)),
        DiskPlace(Path("/c:d"), parse_amount("25%")),
    )


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("127.0.0.1:9100", ("127.0.0.1", 9100)),
        ("127.3.2.1:1", ("127.3.2.1", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("localhost:80", ("localhost", 80)),
        ("/run/stepwell/metrics.sock", "/run/stepwell/metrics.sock"),
    ],
)
def test_where_metrics_may_be_served(text: str, bound: object) -> None:
    assert split_listen(parse_listen(text)) == bound
    assert merge(Settings, parse(f"metrics: '{text}'".encode(), "f")).settings.metrics == text


def test_values_are_written_as_they_are_read() -> None:
    assert texts(Settings()) == {
        "host": "unset",
        "disk": "none",
        "disk_reserve": "5%",
        "disk_queue": "unset",
        "disk_threads": "4",
        "recall": "auto",
        "policy": "auto",
        "placement": "by_worth",
        "write": "through",
        "prefetch": "off",
        "seal": "aes-256-gcm",
        "linger": "10m",
        "linger_empty": "1m",
        "log_level": "info",
        "log_format": "text",
        "metrics": "unset",
        "pin_waiting": "0.5",
        "socket": "unset",
        "allow_uids": "none",
        "tenants": "none",
    }
    some = {"host": "25%", "disk": "/a:3%,/b:1234567", "disk_queue": "1234567", "linger": "601.5s", "metrics": "/m"}
    settings = Settings.model_validate(some)
    assert {name: texts(settings)[name] for name in some} == some
    assert Settings.model_validate(settings.model_dump(mode="json")) == settings


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith("STEPWELL_")]:
        monkeypatch.delenv(name)
    return monkeypatch


def test_the_command_shows_values_and_their_origins(tmp_path: Path, bare: pytest.MonkeyPatch) -> None:
    (tmp_path / "stepwell.yaml").write_text("disk:\n- /a:1TiB\n")
    bare.setenv("STEPWELL_HOST", "25%")
    arguments = ["config", "show", "--home", str(tmp_path)]
    plain = CliRunner().invoke(app, arguments).output
    assert {"host: 25%", "disk: /a:1TiB", "linger: 10m", "metrics: unset"} < set(plain.splitlines())
    shown = [line.split() for line in CliRunner().invoke(app, [*arguments, "--origin"]).output.splitlines()]
    assert ["host:", "25%", "#", "env", "STEPWELL_HOST"] in shown
    assert ["disk:", "/a:1TiB", "#", f"{tmp_path}/stepwell.yaml:1"] in shown
    assert ["seal:", "aes-256-gcm", "#", "default"] in shown
    values = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert values["settings"].keys() == values["origins"].keys() == Settings.model_fields.keys()
    assert (values["settings"]["disk"], values["origins"]["host"]) == (["/a:1TiB"], "env STEPWELL_HOST")
    assert Settings.model_validate(values["settings"]) == load(tmp_path, os.environ).settings


def test_the_command_checks_a_file_that_is_not_in_use_yet(tmp_path: Path, bare: pytest.MonkeyPatch) -> None:
    file = tmp_path / "new.yaml"
    file.write_text("host: 99999TiB\n")
    arguments = ["config", "check", "--home", str(tmp_path / "none"), "--config", str(file)]
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.output) == (0, f"ok: host from {file}:1\n")
    assert json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output) == {"ok": True, "set": ["host"]}
    for text, code in (("hots: 1GiB", "SW-101"), ("allow_uids: 7", "SW-102"), ("disk: /a:99%", "SW-114")):
        file.write_text(text)
        error = CliRunner().invoke(app, arguments).exception
        assert isinstance(error, ConfigError) and error.code == code
    assert list(tmp_path.iterdir()) == [file], "nothing is created"


def test_the_flag_for_an_engine_carries_sizes_and_directories() -> None:
    own: dict[str, bool] = {}

    def flag(*options: str) -> dict[str, str]:
        done = CliRunner().invoke(app, ["vllm-args", "--json", *options])
        if done.exception:
            raise done.exception
        transfer = json.loads(json.loads(done.output)["arguments"][1])
        wishes = transfer.get("kv_connector_extra_config", {})
        own.update({key: wishes.pop(key) for key in ("strict", "receipts") if key in wishes})
        merge(Settings, from_overrides(wishes))  # a well understands it
        return wishes

    assert flag() == own == {}
    assert flag("--strict", "--receipts") == {} and own == {"strict": True, "receipts": True}
    assert flag("--host", "25%", "--disk", "/a:1G", "--disk", "/b") == {"host": "25%", "disk": "/a:1GiB,/b:50%"}
    for options, code in (
        (["--host", "0.000001%"], "SW-107"),
        (["--disk", "here:1GiB"], "SW-102"),
        (["--disk", "/a:1GiB", "--disk", "/a"], "SW-102"),
    ):
        with pytest.raises(ConfigError) as caught:
            flag(*options)
        assert caught.value.code == code


def test_the_flags_for_a_well_below_vllms_own_offloading() -> None:
    def flags(*options: str) -> dict[str, Any]:
        done = CliRunner().invoke(app, ["vllm-args", "--json", *options])
        if done.exception:
            raise done.exception
        transfer: dict[str, Any] = json.loads(json.loads(done.output)["arguments"][1])
        return transfer

    found = flags("--second-door", "--cpu", "64GiB", "--disk", "/a:1TiB", "--strict")
    assert found["kv_connector"] == "OffloadingConnector"
    assert found["kv_connector_extra_config"] == {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 64 << 30,
        "secondary_tiers": [{"type": "stepwell", "disk": "/a:1TiB", "strict": True}],
    }
    for wrong in (
        ["--second-door"],
        ["--cpu", "1GiB"],
        ["--second-door", "--cpu", "1GiB", "--receipts"],
        ["--second-door", "--cpu", "8"],
    ):
        with pytest.raises(ConfigError, match="SW-102"):
            flags(*wrong)


# --- words of an earlier version


def test_an_old_word_is_read_as_the_new_one_and_its_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "stepwell.yaml").write_text("recall: default\npolicy: default\n")
    loaded = load(tmp_path, {"STEPWELL_POLICY": "default"})
    assert loaded.settings == Settings()
    assert loaded.warnings == (
        f"{tmp_path}/stepwell.yaml:1: recall: `default` is `auto` now; the old word goes with the next version",
        "env STEPWELL_POLICY: policy: `default` is `auto` now; the old word goes with the next version",
    )
    assert load(tmp_path, {"STEPWELL_POLICY": "lru", "STEPWELL_RECALL": "auto"}).warnings == ()


def test_an_engine_that_asks_for_an_old_word_is_told_the_new_one() -> None:
    assert judge(Settings())({"recall": "default"}) == [
        "the engine's settings: recall: `default` is `auto` now; the old word goes with the next version"
    ]


def test_commands_warn_of_old_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_RECALL", "default")
    told = CliRunner().invoke(app, ["config", "check", "--home", str(tmp_path)])
    assert (told.exit_code, told.stdout) == (0, "ok: recall from env STEPWELL_RECALL\n")
    assert told.stderr.startswith("stepwell: env STEPWELL_RECALL: recall: `default` is `auto` now")
