"""Settings: every source, its order and origin; whatever is not understood is an error that names its place."""

from __future__ import annotations

from pathlib import Path

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.config import Loaded, Settings, check_sizes, load
from stepwell.config.document import Entry, parse
from stepwell.config.loader import from_env, from_overrides, merge
from stepwell.errors import ConfigError


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
        "linger": 600.0,
        "linger_empty": 60.0,
        "log_level": "info",
        "pin_waiting": 0.25,
        "pin_request": 0.5,
        "socket": None,
        "allow_uids": (),
    }
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.origins.keys() == loaded.settings.model_dump().keys()


def test_later_sources_win_and_each_value_knows_its_own(tmp_path: Path) -> None:
    file = tmp_path / "stepwell.yaml"
    file.write_text("# a well\nhost: 1GiB\nlinger: 5m\nlinger_empty: 1\npin_request: 0.75\n")
    env = {"STEPWELL_LINGER": "6m", "STEPWELL_LINGER_EMPTY": "2s", "STEPWELL_HOME": "/h", "HOME": "/x", "STEPWELLX": ""}
    loaded = load(tmp_path, env, overrides={"linger_empty": 3, "log_level": None})
    assert loaded.settings == Settings(host="1GiB", linger=360, linger_empty=3, pin_request=0.75)  # type: ignore[arg-type]
    assert loaded.origins == {
        "host": f"{file}:2",
        "linger": "env STEPWELL_LINGER",
        "linger_empty": "override",
        "log_level": "default",
        "pin_waiting": "default",
        "pin_request": f"{file}:5",
        "socket": "default",
        "allow_uids": "default",
    }


def test_which_file_is_read(tmp_path: Path) -> None:
    sizes = {"stepwell.yaml": 1, "env.yaml": 2, "named.yaml": 3}
    for name, size in sizes.items():
        (tmp_path / name).write_text(f"host: {size}GiB")
    env = {"STEPWELL_CONFIG": str(tmp_path / "env.yaml")}
    assert load(tmp_path, {}).settings.host == 1 << 30
    assert load(tmp_path, env).settings.host == 2 << 30
    assert load(tmp_path, env, path=tmp_path / "named.yaml").settings.host == 3 << 30
    assert load(tmp_path / "other", {"STEPWELL_CONFIG": ""}).settings.host is None


def test_a_named_file_must_be_readable(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    refused("SW-103", str(missing), "No such file", home=tmp_path, env={}, path=missing)
    refused("SW-103", str(missing), home=tmp_path, env={"STEPWELL_CONFIG": str(missing)})
    refused("SW-103", "directory", home=tmp_path, env={}, path=tmp_path)
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
    assert error.what.startswith("override: pin is not a setting")


def test_an_unknown_variable_is_refused_with_the_closest_name(tmp_path: Path) -> None:
    error = refused("SW-104", home=tmp_path, env={"STEPWELL_HOTS": "4GiB"})
    assert error.what == "STEPWELL_HOTS is not a setting; did you mean STEPWELL_HOST?"
    refused("SW-104", home=tmp_path, env={"STEPWELL_": ""})
    refused("SW-104", home=tmp_path, env={"STEPWELL_HOST__SIZE": "1G"})


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
        ("pin_request: 1.01", "less than or equal to 1"),
        ("pin_request: nan", "finite"),
        ("pin_waiting:", "number"),
    ],
)
def test_a_bad_value_is_refused_with_its_place_and_reason(line: str, why: str) -> None:
    refused("SW-102", f"f.yaml:2: {line.split(':')[0]} cannot be used", why, raw=f"# note\n{line}".encode())


def test_a_bad_value_names_the_source_that_won(tmp_path: Path) -> None:
    (tmp_path / "stepwell.yaml").write_text("host: 1GiB")
    refused("SW-102", "env STEPWELL_HOST: host", home=tmp_path, env={"STEPWELL_HOST": ""})
    error = refused("SW-102", home=tmp_path, env={"STEPWELL_HOST": "4 bananas"})
    assert (error.why, "64GiB" in error.fix) == ("'4 bananas' is not a size", True)
    refused("SW-102", "override: host", home=tmp_path, env={}, overrides={"host": -1})


def test_scalars_are_text_and_mean_what_is_written() -> None:
    """YAML 1.1 would read an octal number and a number to base sixty."""
    assert parse(b"a: 0100\nb: 1:30\nc: no\nd: 2026-01-01\ne: ~\nf:\ng: 'null'\n", "f") == [
        Entry(("a",), "0100", "f:1"),
        Entry(("b",), "1:30", "f:2"),
        Entry(("c",), "no", "f:3"),
        Entry(("d",), "2026-01-01", "f:4"),
        Entry(("e",), None, "f:5"),
        Entry(("f",), None, "f:6"),
        Entry(("g",), "null", "f:7"),
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
    check_sizes(Settings(), 0)
    check_sizes(Settings(host=gib), gib)
    with pytest.raises(ConfigError) as caught:
        check_sizes(Settings(host=gib), gib - 1)
    assert caught.value.code == "SW-106"
    assert "1023MiB" in caught.value.fix
    check_sizes(Settings(host=64 << 20), gib)
    with pytest.raises(ConfigError) as caught:
        check_sizes(Settings(host=(64 << 20) - 1), gib)
    assert caught.value.code == "SW-107"
    assert "64MiB" in caught.value.fix
    check_sizes(Settings(host=16 << 20), gib, minimum=16 << 20)
