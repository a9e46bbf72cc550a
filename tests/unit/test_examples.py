"""The files in examples/ fit together, load, and say what the code says."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from stepwell.config import Settings, load
from stepwell.engines.vllm.plugin import NAME

EXAMPLES = Path(__file__).parents[2] / "examples"
UNIT = EXAMPLES / "systemd/stepwell.service"
DROP_IN = EXAMPLES / "systemd/vllm.service.d/stepwell.conf"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load(tmp_path, {}, path=EXAMPLES / "stepwell.yaml").settings


@pytest.fixture
def compose() -> Any:
    return yaml.safe_load((EXAMPLES / "compose/compose.yaml").read_text())


def unit(path: Path) -> dict[str, list[str]]:
    """All values of each key of a unit; sections do not repeat keys."""
    values: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if match := re.fullmatch(r"(\w+)=(.*)", line):
            values.setdefault(match[1], []).append(match[2])
    return values


def test_the_settings_are_those_of_one_well_for_several_engines(settings: Settings) -> None:
    assert settings.socket == Path("/run/stepwell/well.sock")
    assert settings.allow_uids == (1001, 1002)
    assert [str(place) for place in settings.disk] == ["/var/lib/stepwell/disk:80%"]
    assert (str(settings.host), str(settings.disk_reserve), settings.metrics) == ("25%", "5%", "127.0.0.1:9464")


def test_the_services_mean_the_same_socket_and_folders(settings: Settings) -> None:
    well, engine = unit(UNIT), unit(DROP_IN)
    assert settings.socket is not None
    assert f"STEPWELL_SOCKET={settings.socket}" in engine["Environment"]
    assert Path("/run", *well["RuntimeDirectory"]) == settings.socket.parent
    assert well["RuntimeDirectoryMode"] == ["0750"], "the group may reach the socket, and nobody may exchange it"
    assert engine["SupplementaryGroups"] == well["Group"]
    state = [Path("/var/lib", name) for name in well["StateDirectory"][0].split()]
    assert {place.path for place in settings.disk} <= set(state)
    home = next(value for value in well["Environment"] if value.startswith("STEPWELL_HOME="))
    assert Path(home.partition("=")[2]) in state
    assert engine["Wants"] == engine["After"] == [UNIT.name]


def test_the_units_are_well_formed(tmp_path: Path) -> None:
    for path in (UNIT, DROP_IN):
        parser = configparser.RawConfigParser(strict=False, delimiters=("=",))
        parser.read_string(path.read_text())
        assert {"Unit", "Service"} <= set(parser.sections())
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    # What the unit names is not on this machine: its user, and the command.
    text = re.sub(r"(?m)^ExecStart=.*$", "ExecStart=/bin/true", UNIT.read_text())
    (tmp_path / UNIT.name).write_text(re.sub(r"(?m)^(User|Group)=.*$", r"\1=root", text))
    (tmp_path / "vllm.service").write_text("[Service]\nExecStart=/bin/true\n")
    (tmp_path / DROP_IN.parent.name).mkdir()
    (tmp_path / DROP_IN.parent.name / DROP_IN.name).write_text(DROP_IN.read_text().replace("stepwell\n", "root\n"))
    for name in (UNIT.name, "vllm.service"):
        done = subprocess.run(["systemd-analyze", "verify", str(tmp_path / name)], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_the_containers_mean_the_same_socket_users_and_group(settings: Settings, compose: Any) -> None:
    services = compose["services"]
    well = services.pop("well")
    assert sorted(services) == ["engine-1", "engine-2"]
    assert settings.socket is not None
    group = well["user"].partition(":")[2]
    owner = well["user"].partition(":")[0]
    assert f"uid={owner},gid={group},mode=2750" in compose["volumes"]["socket"]["driver_opts"]["o"]
    assert f"socket:{settings.socket.parent}" in well["volumes"]
    assert well["mem_limit"] == well["memswap_limit"], "no swap"
    for engine in services.values():
        assert engine["environment"]["STEPWELL_SOCKET"] == str(settings.socket)
        assert f"socket:{settings.socket.parent}:ro" in engine["volumes"]
        assert engine["group_add"] == [group]
        assert NAME in engine["command"][1]
        assert "shm_size" in engine and "shm_size" not in well and "pid" not in engine
    assert sorted(int(engine["user"].partition(":")[0]) for engine in services.values()) == sorted(settings.allow_uids)
    dockerfile = (EXAMPLES / "compose/Dockerfile").read_text()
    assert {service["build"]["target"] for service in (well, *services.values())} <= set(
        re.findall(r"^FROM \S+ AS (\w+)$", dockerfile, re.MULTILINE)
    )
    assert f"-o {owner}" in dockerfile and f"USER {well['user']}" in dockerfile


def test_the_builder_gets_what_installing_takes_and_no_more() -> None:
    root = EXAMPLES.parent
    ignored, *lines = [line for line in (root / ".dockerignore").read_text().splitlines() if line[:1] not in ("#", "")]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"], "src"}
    assert project["tool"]["hatch"]["version"]["path"].startswith("src/")
    assert ignored == "*" and {line[1:] for line in lines if line.startswith("!")} == needed
    assert all((root / name).exists() for name in needed)
    assert "COPY" not in (EXAMPLES / "compose/Dockerfile").read_text(), "no layer keeps the source"


def test_the_library_finds_what_an_earlier_prompt_had() -> None:
    done = subprocess.run([sys.executable, EXAMPLES / "library.py"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "0 of 12 blocks were there never_seen\n10 of 12 blocks were there never_seen\n"
