"""Where keys lie, what is wiped, and that nothing from outside is ever unpickled or evaluated."""

from __future__ import annotations

import ast
import base64
import contextlib
import ctypes
import logging
import os
import pickle
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from wells import home_apart

from lab.trust.secrets import cores
from stepwell.config import Settings
from stepwell.errors import ProtocolError
from stepwell.io.process import dumps
from stepwell.protocol import wire
from stepwell.serve import process
from stepwell.serve.metrics.endpoint import MetricsServer
from stepwell.vault import memory
from stepwell.vault.keyring import Epoch, Keyring
from stepwell.vault.memory import KEY_BYTES, Locker, wipe

ROOT = Path(__file__).parents[2]


def address(view: memoryview) -> int:
    """Of a view that cannot be written."""
    get = ctypes.pythonapi.PyObject_GetBuffer
    layout = (ctypes.c_void_p * 16)()
    assert get(ctypes.py_object(view), ctypes.byref(layout), 0) == 0
    found = int(layout[0] or 0)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(layout))
    return found


def mapping(at: int) -> dict[str, str]:
    """What smaps says of the mapping that holds this address."""
    fields: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            low, high = (int(side, 16) for side in first.split("-"))
            inside = low <= at < high
        elif inside:
            fields[first[:-1]] = rest.strip()
    return fields


def test_keys_lie_in_memory_that_is_not_dumped_and_not_swapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.cells, "_free", [])  # a fork's own: what its parent has locked is not locked in it
    (epoch,) = Keyring.open(tmp_path / "keyring").tenant("default").epochs
    for key in (epoch.key, epoch.id_key, epoch.segment_key(b"s" * 16)[0]):
        assert isinstance(key, memoryview) and key.readonly and len(key) == KEY_BYTES
        flags = mapping(address(key))["VmFlags"].split()
        assert "dd" in flags, "not in core dumps"
        assert ("lo" in flags) == memory.cells.locked
    assert memory.cells.locked or not memory.may_lock()


def test_a_key_that_nobody_holds_is_zeroed_and_its_place_used_again() -> None:
    locker = Locker()
    key = locker.keep(b"k" * KEY_BYTES)
    at = address(key)
    assert ctypes.string_at(at, KEY_BYTES) == b"k" * KEY_BYTES
    del key
    assert ctypes.string_at(at, KEY_BYTES) == bytes(KEY_BYTES)
    assert address(locker.keep(b"l" * KEY_BYTES)) == at


def test_any_number_of_keys_is_held() -> None:
    locker = Locker()
    held = [locker.keep(bytes([n % 256, n // 256] * 16)) for n in range(1000)]
    assert all(bytes(key) == bytes([n % 256, n // 256] * 16) for n, key in enumerate(held))
    del held[::2]
    assert all(bytes(key) == bytes([n % 256, n // 256] * 16) for n, key in zip(range(1, 1000, 2), held, strict=True))


def test_a_system_that_locks_no_memory_keeps_no_well_from_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "try_lock", lambda view: False)
    locker = Locker()
    assert bytes(locker.keep(b"k" * KEY_BYTES)) == b"k" * KEY_BYTES
    assert not locker.locked


def test_keys_are_still_there_when_the_interpreter_ends() -> None:
    """A thread that seals until the very end must not seal with zeros."""
    code = (
        "import atexit; held = []; atexit.register(lambda: print(bytes(held[0].key)[:4], flush=True)); "
        "from stepwell.vault.keyring import Epoch; held.append(Epoch(1, b'k' * 32))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert "b'kkkk'" in said.stdout


def test_what_is_taken_is_wiped_and_what_is_lent_is_not() -> None:
    mine, lent = os.urandom(32), os.urandom(32)
    copy = bytes(bytearray(mine))
    held = memory.cells.take(mine)
    assert bytes(held) == copy and mine == bytes(32)
    kept = Epoch(1, lent)
    assert bytes(kept.key) == lent != bytes(32)
    array = bytearray(b"secret")
    wipe(array)
    assert array == bytes(6)


READING = """
import sys
from pathlib import Path
from stepwell.vault.keyring import Keyring

(epoch,) = Keyring.open(Path(sys.argv[1])).tenant("default").epochs
print("read", flush=True)
sys.stdin.readline()
held = epoch.id_key, epoch.segment_key(b"s" * 16)
print("derived", flush=True)
sys.stdin.readline()
"""


def test_reading_a_keyring_and_deriving_keys_leaves_one_copy_of_the_tenants_key(tmp_path: Path) -> None:
    """Both when the keyring is made and when it is there. Without Python's own pools, in which what was freed is used
    again so soon that the search would find little; looked at from outside, which changes nothing."""
    for _ in range(2):
        command = [sys.executable, "-c", READING, str(tmp_path / "keyring")]
        env = environment() | {"PYTHONMALLOC": "malloc"}
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as reader:
            assert reader.stdout is not None and reader.stdin is not None
            for done in ("read\n", "derived\n"):
                assert reader.stdout.readline() == done
                key = bytes(Keyring.read(tmp_path / "keyring").tenant("default").epochs[0].key)
                wanted = {"first half": [key[:16]], "second half": [key[16:]], "text": [base64.b64encode(key[:30])]}
                found = cores.found(cores.memory(reader.pid, tmp_path / "memory"), wanted)
                assert found == {"first half": 1, "second half": 1}, done
                reader.stdin.write("\n")
                reader.stdin.flush()


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT / "src")}


FORBIDDEN = """
import resource
from stepwell.io.process import dumps
resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
dumps.forbid()
import ctypes
print(dumps.FILTER.read_text().strip(), resource.getrlimit(resource.RLIMIT_CORE)[0], ctypes.CDLL(None).prctl(3))
"""


def test_a_process_that_forbids_dumps_has_all_three_locks() -> None:
    said = subprocess.run([sys.executable, "-c", FORBIDDEN], capture_output=True, text=True, check=True,
                          env=environment())  # fmt: skip
    words = said.stdout.split()
    if os.geteuid() and not words:  # what is not dumpable cannot read its own /proc
        pytest.skip("only root can look")
    assert [int(words[0], 16), int(words[1]), int(words[2])] == [0, 0, 0]


def lock_of(name: str) -> int:
    """One of the three, as it is in this process; 0: shut."""
    match name:
        case "filter":
            return int(dumps.FILTER.read_text(), 16)
        case "limit":
            return resource.getrlimit(resource.RLIMIT_CORE)[0]
    return int(ctypes.CDLL(None).prctl(3))


@pytest.mark.parametrize("lock", ["filter", "limit", "dumpable"])
def test_forbidding_dumps_shuts_each_lock(lock: str) -> None:
    """In a child, which opens it first, if it can."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
            resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
            with contextlib.suppress(OSError):
                dumps.FILTER.write_text("0x33")
            before = lock_of(lock)
            dumps.forbid()
            os.write(write, f"{before} {lock_of(lock)}".encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with open(read) as pipe:
        said = pipe.read().split()
    if not said or said[0] == "0":
        pytest.skip("it cannot be looked at, or cannot be open here")
    assert said[1] == "0"


def test_dumps_are_forbidden_before_keys_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, so that both are only noted."""
    done: list[str] = []

    class Ring:
        @staticmethod
        def open(path: Path, tenants: object) -> None:
            done.append("read")
            raise SystemExit

    monkeypatch.setattr(process, "Keyring", Ring)
    monkeypatch.setattr(process.dumps, "forbid", lambda: done.append("forbidden"))
    monkeypatch.setattr(process, "_raise_open_files", lambda: None)
    with home_apart(monkeypatch) as home, pytest.raises(SystemExit):
        process.run(home, Settings())
    assert done == ["forbidden", "read"]


WHEN_READ = """
import resource, sys
from pathlib import Path
from stepwell.config import Settings
from stepwell.serve import process

class Ring:
    @staticmethod
    def open(path, tenants=()):
        print(Path("/proc/self/coredump_filter").read_text().strip(), resource.getrlimit(resource.RLIMIT_CORE)[0])
        raise SystemExit

process.Keyring = Ring
process.run(Path(sys.argv[1]), Settings())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="what is not dumpable cannot read its own /proc, unless it is root's")
def test_the_well_forbids_dumps_before_it_reads_keys(tmp_path: Path) -> None:
    env = environment() | {"XDG_RUNTIME_DIR": "", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", WHEN_READ, str(tmp_path / "home")]
    said = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert said.stdout.split() == ["00000000", "0"], said.stderr


# --- what is never done with bytes from outside ----------------------------------------------------------------------

UNSAFE = ("pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "code",
          "multiprocessing.connection")  # fmt: skip
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {("yaml", "load"), ("yaml", "unsafe_load"), ("yaml", "full_load"), ("torch", "load"), ("numpy", "load"),
           ("np", "load")}  # fmt: skip


def unsafe(source: str) -> list[str]:
    """What a file does that could run what it reads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [alias.name for alias in names if is_unsafe(alias.name)]
            case ast.ImportFrom(module=str(name)) if is_unsafe(name):
                found.append(name)
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                found.append(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name)) if (module, name) in METHODS:
                found.append(f"{module}.{name}")
            case ast.keyword(arg="allow_pickle"):
                found.append("allow_pickle")
    return found


def is_unsafe(module: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in UNSAFE)


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from marshal import loads", "eval(x)", "yaml.load(x)", "torch.load(x)", "exec(x)",
     "np.load(x, allow_pickle=True)", "import multiprocessing.connection"],
)  # fmt: skip
def test_the_scan_finds_what_is_unsafe(line: str) -> None:
    assert unsafe(line)


def test_nothing_in_the_source_runs_what_it_reads() -> None:
    files = sorted((ROOT / "src").rglob("*.py"))
    assert len(files) > 100
    assert {str(file): found for file in files if (found := unsafe(file.read_text()))} == {}


# --- what errors say -------------------------------------------------------------------------------------------------


def test_a_message_that_is_none_is_refused_without_repeating_it() -> None:
    for body in (b"\x92\xa6SECRET\x01", b"\x92\xa4Ping\xa6SECRET", b"\xa6SECRET", b"\x92\xa6Report\x81\xa6SECRET\xa1x"):
        with pytest.raises(ProtocolError) as caught:
            list(wire.Reader(wire.from_engine).feed(len(body).to_bytes(4, "little") + body))
        assert "SECRET" not in str(caught.value)
        assert len(str(caught.value)) < 500


def test_the_suite_refuses_to_unpickle_on_our_behalf() -> None:
    """The hook in conftest: tried with code that claims to be a file of ours."""
    data = pickle.dumps(Path)
    assert pickle.loads(data) is Path, "elsewhere it is allowed"
    ours = compile("answer = pickle.loads(data)", str(ROOT / "src/stepwell/serve/server/server.py"), "exec")
    with pytest.raises(RuntimeError, match="on behalf of"):
        exec(ours, {"pickle": pickle, "data": data})


def test_a_scrape_is_not_repeated_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    address = tmp_path / "m.sock"
    caplog.set_level(logging.DEBUG, "stepwell")
    with MetricsServer(str(address), tmp_path, tmp_path / "well.sock"), socket.socket(socket.AF_UNIX) as scraper:
        scraper.connect(str(address))
        scraper.sendall(b"GET /SECRET?SECRET HTTP/1.1\r\n\r\n")
        while scraper.recv(4096):
            pass
    assert "404" in caplog.text
    assert "SECRET" not in caplog.text
