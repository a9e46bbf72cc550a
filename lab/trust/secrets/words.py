"""Nothing that people or programs can look at tells tokens, prompts, tenants or keys: a row of the campaign `secrets`.

A well is driven through all that makes it speak (spills, recalls, damage, refusals, clears, every command), with words
planted wherever a peer can put some; then all that it has said is searched for them.
"""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from blake3 import blake3

from lab.trust.budget import Budget
from lab.trust.report import Row
from lab.trust.secrets import courier
from lab.trust.secrets.dumps import BLOCKS, ids_of, keys_of, move
from lab.trust.secrets.stage import Stage
from stepwell.block.facts import facts_text
from stepwell.client import control
from stepwell.protocol import messages as m
from stepwell.protocol import wire

_TOLD = "nothing said or named tells tokens, prompts, tenants or keys"
_REST = "no block's content and no digest on disk"
_PROMPT, _TENANT, _FOLDER = "umbrielprompt", "tenant-umbriel", "umbriel-home"
_METRICS = re.compile(r"metrics at (\S+)")

Words = dict[str, list[bytes]]


def run(budget: Budget) -> Iterator[Row]:
    with Stage(settings={"log_level": "debug", "metrics": f"127.0.0.1:{_port()}"}, keyring=_keyring()) as stage:
        client = stage.courier()
        move(stage, client)
        told = _vex(stage)
        _damage(stage.disk)
        control.clear(stage.home, ["host"], socket=stage.socket)
        stage.say(client, f"recall 0 {BLOCKS}")
        stage.say(client, f"spill {BLOCKS} 2")
        stage.written()
        yield _at_rest(budget, stage)
        words, places = words_of(stage), {**_files(stage), **_names(stage), **_commands(stage)}
        places["refusals"] = told
        assert client.stdin is not None
        client.stdin.close()
        client.wait()
        places["stop"] = stage.command("stop").encode()
        stage.well.wait()
        places |= _files(stage)
        found = [f"{word} in {place}" for place, said in places.items() for word in tells(said, words)]
        shown = tells((stage.home / "keyring").read_bytes(), words)
        if not {"tenant", "tenant key"} <= set(shown) or b'not_recalled_damaged":' not in places["stats --json"]:
            yield Row(_TOLD, 0, 0, budget.seed, "nothing shown: the search finds not even what is there")
            return
        remark = f"{len(words)} secrets x {len(places)} places: logs, pages, commands, names, messages"
        yield Row(_TOLD, len(words) * len(places), len(found), budget.seed, remark, tuple(found[:10]))


def words_of(stage: Stage) -> Words:
    """What nobody is to find, in the forms in which it might be said: as bytes, as more than 8 hex digits, in base64
    and as Python shows bytes; texts as they are."""
    raw = {f"digest of block {n}": courier.digest(n) for n in range(BLOCKS)}
    raw |= {f"content of block {n}": courier.marker(n) for n in range(BLOCKS)}
    raw |= {name: forms[0] for name, forms in ids_of(stage).items()}
    texts = {"prompt": _PROMPT, "tenant": _TENANT, "folder": _FOLDER}
    return (
        {name: forms(secret) for name, secret in raw.items()}
        | {name: [text.encode()] for name, text in texts.items()}
        | {name: list(forms) for name, forms in keys_of(stage).items()}
    )


def forms(secret: bytes) -> list[bytes]:
    digits = secret.hex()[:10]
    return [
        secret,
        digits.encode(),
        digits.upper().encode(),
        base64.b64encode(secret)[:12],
        repr(secret)[2:30].encode(),
    ]


def tells(said: bytes, words: Words) -> list[str]:
    return [name for name, wanted in words.items() if any(form in said for form in wanted)]


def _at_rest(budget: Budget, stage: Stage) -> Row:
    """Sealed directories have neither content nor digests; that the search finds them is tried on a plain one."""
    words = {name: forms for name, forms in words_of(stage).items() if not name.startswith("id of")}
    found = [f"{word} in {name}" for name, said in _contents(stage.disk) for word in tells(said, words)]
    modes = {stat: oct(path.stat().st_mode & 0o777) for path, stat in ((stage.home / "keyring", "keyring"),)}
    modes |= {str(path.name): oct(path.stat().st_mode & 0o777) for path in stage.disk.iterdir() if path.is_file()}
    found += [f"mode {mode} of {name}" for name, mode in modes.items() if mode != "0o600"]
    with Stage(settings={"log_format": "json", "seal": "plain"}) as plain:
        move(plain, plain.courier())
        shown = {word for _, said in _contents(plain.disk) for word in tells(said, words)}
    if not any(word.startswith("content") for word in shown):
        return Row(_REST, 0, 0, budget.seed, "nothing shown: not even a plain directory has the blocks")
    cases = len(words) * (len(modes) - 1) + len(modes)
    return Row(_REST, cases, len(found), budget.seed, "markers x files, and modes; a plain tier has them", tuple(found))


# --- making it speak --------------------------------------------------------------------------------------------------


def _vex(stage: Stage) -> bytes:
    """Peers without manners, with words in every field that takes some; and a scraper with words in its address. What
    they were told."""
    facts = facts_text({_PROMPT: _PROMPT})
    sane = m.Hello(
        m.PROTOCOL, "scheduler", _PROMPT, 0, 1, courier.SHARD, b"l" * 32, b"w" * 32, b"m" * 32, 16, facts=facts,
        groups=[m.CacheGroup(_PROMPT, 1, 1, 1, _PROMPT, 16, courier.SHARD)], flags=[_PROMPT],
    )  # fmt: skip
    tag = wire.frame(m.Ping(1)).replace(b"Ping", _PROMPT.encode()[:4])
    rude: list[bytes] = [
        _framed(b"\x92" + bytes([0xA0 | len(_PROMPT)]) + _PROMPT.encode() + b"\x01"),
        tag,
        _framed(_PROMPT.encode()),
        (1 << 31).to_bytes(4, "little") + _PROMPT.encode(),
        wire.frame(m.Hello(99, _PROMPT, _PROMPT)),
        wire.frame(m.Hello(m.PROTOCOL, _PROMPT, _PROMPT)),
        wire.frame(m.Hello(m.PROTOCOL, "worker", _PROMPT, 0, 1, courier.SHARD, _PROMPT.encode())),
        wire.frame(m.Hello(m.PROTOCOL, "admin")) + wire.frame(m.Clear([_PROMPT], _PROMPT.encode())),
        wire.frame(m.Hello(m.PROTOCOL, "admin")) + wire.frame(m.Ask(1, 0, 0, courier.digest(0))),
        wire.frame(sane) + wire.frame(m.Report({_PROMPT + " 31337": 1, _PROMPT.upper(): 2})),
        wire.frame(sane) + wire.frame(m.Ask(1, 0, 0, courier.digest(0))),
        wire.frame(sane) + wire.frame(m.Recall(1, 1, 0, 1)),
    ]
    told = b""
    for words in rude:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(5)
            peer.connect(str(stage.socket))
            peer.sendall(words)
            peer.shutdown(socket.SHUT_WR)
            told += _drain(peer)
    other = courier.Courier(stage.home, f"/home/{_FOLDER}/models/a model", at=stage.socket)
    other.spill([BLOCKS + 5])
    other.close()
    for path in ("/metrics", f"/{_PROMPT}", f"/metrics?{_PROMPT}", "/healthz"):
        told += _page(stage, path)
    return told


def _framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


def _drain(peer: socket.socket) -> bytes:
    said = b""
    try:
        while data := peer.recv(1 << 16):
            said += data
    except OSError:
        pass
    return said


def _page(stage: Stage, path: str) -> bytes:
    address = _METRICS.search(stage.said("well"))
    if address is None:
        raise OSError("the well does not say where its metrics are")
    try:
        with urllib.request.urlopen(f"http://{address[1]}{path}", timeout=5) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        return error.read()


def _port() -> int:
    """One that is free at the moment."""
    with socket.socket() as any_:
        any_.bind(("127.0.0.1", 0))
        return int(any_.getsockname()[1])


def _damage(disk: Path) -> None:
    """A byte in the middle of every other page of what is on disk, heads of segments left alone."""
    for path in disk.glob("*.seg"):
        with path.open("r+b") as file:
            for at in range(64 << 10, min(path.stat().st_size, 4 << 20), 8192):
                file.seek(at)
                file.write(b"\xff")


# --- where it speaks --------------------------------------------------------------------------------------------------


def _contents(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield path.name, path.read_bytes()


def _files(stage: Stage) -> dict[str, bytes]:
    """What lies in home, beside the keyring, and what well and client have said."""
    said = {f"home/{name}": content for name, content in _contents(stage.home) if name != "keyring"}
    return said | {
        "names of files": "\n".join(str(path) for path in stage.folder.rglob("*")).encode(),
        "the well's standard error": stage.said("well").encode(),
        "the client's standard error": stage.said("courier").encode(),
        "messages from the well": stage.heard.read_bytes(),
    }


def _names(stage: Stage) -> dict[str, bytes]:
    """Of shared memory, sockets, processes and threads."""
    process = Path(f"/proc/{stage.well.pid}")
    places = {f"/proc/PID/{name}": (process / name).read_bytes() for name in ("cmdline", "comm", "maps")}
    links = [os.readlink(link) for link in (process / "fd").iterdir() if link.is_symlink()]
    threads = [(task / "comm").read_text() for task in (process / "task").iterdir()]
    return places | {
        "open files": "\n".join(links).encode(),
        "threads": "".join(threads).encode(),
        "named shared memory": "\n".join(os.listdir("/dev/shm")).encode(),
        "sockets": Path("/proc/net/unix").read_bytes(),
    }


def _commands(stage: Stage) -> dict[str, bytes]:
    """What commands and pages say to whoever runs the well. Only `namespaces --json` names tenants, to their owner."""
    at, disk = ("--socket", str(stage.socket)), str(stage.disk)
    wanted: Mapping[str, tuple[str, ...]] = {
        "stats --json": ("stats", "--json", *at),
        "namespaces --json": ("cache", "namespaces", "--json", *at),
        "doctor --json": ("doctor", "--json", "--disk", f"{disk}:256MiB", *at),
        "fsck --json": ("cache", "fsck", disk, "--json"),
        "config show": ("config", "show", "--origin"),
        "clear": ("cache", "clear", "--tier", "host", *at),
        "clear of nothing": ("cache", "clear", "--namespace", secrets.token_hex(16), *at),
        "uninstall": ("uninstall",),
    }
    said = {name: stage.command(*words).encode() for name, words in wanted.items()}
    return said | {f"page {path}": _page(stage, path) for path in ("/metrics", "/healthz", "/other")}


def _keyring() -> bytes:
    """With a tenant whose name is a word. Format: `vault.keyring`."""
    tenants = [
        {"name": name, "epochs": [{"number": 1, "key": base64.b64encode(secrets.token_bytes(32)).decode()}]}
        for name in ("default", _TENANT)
    ]
    record = {"format": "stepwell keyring", "version": 1, "wrap": "file", "tenants": tenants}
    bare = json.dumps(record | {"checksum": ""}, separators=(",", ":")).encode()
    whole = record | {"checksum": blake3(bare).hexdigest()}
    return json.dumps(whole, separators=(",", ":")).encode() + b"\n"
