"""The well as a process: what it takes from the system before it serves, and what it gives back.

However the well ends, what stays are the files of its home, its lock and what the disk tier has written (after SIGKILL
also a socket without a listener, which the next well replaces). Called by `stepwell serve` in the foreground and by
`serve.detached`.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import signal
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from stepwell import __version__
from stepwell.block.namespace import DEFAULT_TENANT
from stepwell.client.control import pid_at
from stepwell.client.start import lock, rendezvous
from stepwell.config import Settings, check_host, check_together, queue_bytes
from stepwell.errors import BackendDown, ConfigError
from stepwell.hierarchy.core import Limits, Options, System
from stepwell.hierarchy.hierarchy import Hierarchy
from stepwell.hierarchy.sessions.sealing import Sealing
from stepwell.io.clock import MonotonicClock
from stepwell.io.host import default_host_bytes, memory_allowed
from stepwell.io.memory import SystemMemory
from stepwell.io.paths import Rendezvous, check_socket_dir, prepare_home
from stepwell.io.process import dumps
from stepwell.log import logger, well_log
from stepwell.policies.catalog import PLACEMENTS, POLICIES
from stepwell.policies.decide import RecallMode
from stepwell.policies.writing.named import WRITE_POLICIES
from stepwell.serve.executor import ThreadExecutor, Wakeup
from stepwell.serve.home.disks import remember
from stepwell.serve.home.holding import holding
from stepwell.serve.home.store import HomeStore
from stepwell.serve.log_messages import log_event
from stepwell.serve.loop import Linger, Loop
from stepwell.serve.options import judge
from stepwell.serve.reload import Reloading
from stepwell.serve.server.admin import Shell
from stepwell.serve.server.gates import Gate, gate_plans, opened
from stepwell.serve.storage import make_storage, take_sites
from stepwell.tiers.disk.tier import Site
from stepwell.units import format_size
from stepwell.vault.keyring import Keyring
from stepwell.vault.memory import cells, lock_limit

KEYRING_NAME = "keyring"
_OPEN_FILES = 16384  # two for each connection, one for each slab and each watched process
# How long an end may take, all together less than the 10 s that `stepwell stop` waits.
_DRAIN_SECONDS = 5.0
_HOME_SECONDS = 1.0  # beyond those, in which home is written too
_JOB_SECONDS = 2.0

log = logging.getLogger("stepwell.serve")


def run(
    home: Path,
    settings: Settings,
    *,
    locked: int | None = None,
    linger: bool = False,
    ready: Callable[[Path], None] = lambda socket_path: None,
    reread: Callable[[], Settings] | None = None,
    warnings: Sequence[str] = (),
) -> str:
    """Serves `home` until SIGTERM, SIGINT, `stepwell stop` or, with `linger`, until no engine has used it for long
    enough.

    For the main thread of a process of its own. `locked` is the descriptor of the home's lock if the caller holds it.
    `ready` is called when connections are accepted. `reread` gives the settings as they are written now, on SIGHUP and
    `stepwell reload`; it may block and raises StepwellError. `warnings` of the settings go into the log.

    Returns why it ended. Raises StepwellError if it cannot start: BackendDown SW-501 (another one runs) and SW-502 (the
    system refused something), and the errors of home, keyring, settings and memory.
    """
    served: list[Path] = []

    def begun(at: Path) -> None:
        served.append(at)
        ready(at)

    try:
        return _run(home, settings, locked, linger, begun, reread or (lambda: settings), warnings)
    except OSError as error:
        if served:
            raise
        raise BackendDown(
            "SW-502",
            what="the well did not start",
            why=str(error),
            fix="see that home and disks can be written, and that memory, threads and open files are not used up",
        ) from error


def _run(
    home: Path,
    settings: Settings,
    locked: int | None,
    linger: bool,
    ready: Callable[[Path], None],
    reread: Callable[[], Settings],
    warnings: Sequence[str],
) -> str:
    check_together(settings)
    prepare_home(home)
    by_home = rendezvous(home)
    plans = gate_plans(settings, settings.socket or by_home.socket, os.geteuid())
    with contextlib.ExitStack() as held:
        for plan in plans if settings.socket is not None else plans[1:]:
            place = _named(plan.path, shared=plan.shared)
            # First, and so given back last: `stepwell stop` waits for it.
            held.enter_context(_locked(home, place, None))
        held.enter_context(_locked(home, by_home, locked))
        held.enter_context(holding(home, by_home if settings.socket is None else Rendezvous.named(plans[0].path)))
        host = _host_bytes(settings)
        dumps.forbid()  # before there are keys and KV in memory
        _raise_open_files()
        keyring = Keyring.open(home / KEYRING_NAME, (DEFAULT_TENANT, *settings.tenants))
        held.enter_context(well_log(home, settings.log_level, form=settings.log_format))
        for warning in warnings:
            log.warning("%s", warning)
        if not cells.locked:
            log.warning("keys may be swapped to disk: this process may lock %d bytes of memory", max(lock_limit(), 0))
        with contextlib.ExitStack() as listening:
            gates = [listening.enter_context(opened(plan)) for plan in plans]
            listening.enter_context(_metrics(settings.metrics, home, plans[0].path))
            sites = take_sites(settings)
            _remember(home, settings)
            return _serve(home, settings, host, keyring, sites, gates, linger, lambda: ready(plans[0].path), reread)


def _serve(
    home: Path,
    settings: Settings,
    host: int,
    keyring: Keyring,
    sites: Sequence[Site],
    gates: Sequence[Gate],
    linger: bool,
    ready: Callable[[], None],
    reread: Callable[[], Settings],
) -> str:
    clock = MonotonicClock()
    wakeup = Wakeup()
    executor = ThreadExecutor(wakeup)
    sealing = Sealing(keyring, sealed=settings.seal != "plain", wall=time.time)
    storage = make_storage(settings, sites, wakeup, clock, sealing)
    executors = [executor, *storage.executors]
    store = HomeStore(home)
    hierarchy = Hierarchy(
        Limits(host, queue_bytes(settings, host), storage.readers),
        System(clock, executor, SystemMemory()),
        sealing,
        options(settings, host),
        well=__version__,
        tiers=storage.tiers,
        policy=POLICIES[settings.policy],
        tenants=1 + len(settings.tenants),
        saved=store.load(),
        store=store,
        sink=log_event,
    )

    def apply(settings: Settings) -> None:
        hierarchy.follow(options(settings, host))
        loop.linger = Linger(settings.linger, settings.linger_empty) if linger else None
        logger.setLevel(settings.log_level.upper())

    reader = ThreadExecutor(wakeup, 1)
    executors.append(reader)
    reloading = Reloading(settings, reread, apply, reader, clock, idle=() if linger else ("linger", "linger_empty"))
    shell = Shell(lambda: store.pauses_saved, reloading.begin, reloading.keep_time, lambda: reloading.next_moment)
    lingers = Linger(settings.linger, settings.linger_empty) if linger else None
    loop = Loop(hierarchy, gates, clock, executors, wakeup, linger=lingers, shell=shell)
    with _signals(loop, wakeup):
        log.info("stepwell %s serves, host %s, process %d", __version__, format_size(host), os.getpid())
        for pause in hierarchy.pauses.all:
            log.warning("paused: %s; `stepwell resume` undoes it", pause)
        hierarchy.recover()
        ready()
        gc.collect()
        gc.freeze()
        try:
            why = loop.run()
            log.info("the well ends: %s", why)
            if learned := hierarchy.costs.learned:
                store.save_calibrations(learned)
            if not loop.drain(_DRAIN_SECONDS):
                log.warning("what still waited to be written is given up")
            if not store.close(_HOME_SECONDS):
                log.warning("home does not answer: what was learned lately is not kept for the next well")
        except Exception:
            log.exception("the well ends because of an error in itself")  # its standard error is not read any more
            raise
    stuck = [each for each in executors if not each.close(_JOB_SECONDS)]
    if not stuck:
        hierarchy.close()
    else:
        log.warning("a job is stuck in the system and is left behind")
    wakeup.close()
    return why


def options(settings: Settings, host: int | None = None) -> Options:
    """What of these settings may change while the well serves; `host` as of `judge`."""
    return Options(
        RecallMode(settings.recall),
        PLACEMENTS[settings.placement](),
        WRITE_POLICIES[settings.write](),
        settings.prefetch == "on",
        settings.pin_waiting,
        judge(settings, host),
    )


def _host_bytes(settings: Settings) -> int:
    """The arena's size, checked. Raises ConfigError SW-106 or SW-107."""
    allowed = memory_allowed()
    host = default_host_bytes() if settings.host is None else settings.host.of(allowed)
    check_host(host, allowed)
    return host


def _named(socket: Path, *, shared: bool) -> Rendezvous:
    """The rendezvous at a path that the operator gave. Raises ConfigError and AccessDenied if it cannot be used."""
    place = Rendezvous.named(socket)
    check_socket_dir(socket, shared=shared)
    if os.path.lexists(socket) and not stat.S_ISSOCK(socket.lstat().st_mode):
        raise ConfigError(
            "SW-102",
            what=f"socket = {socket} cannot be used",
            why="something else is there, and it is not removed",
            fix="give the well a path of its own",
        )
    return place


def _remember(home: Path, settings: Settings) -> None:
    """Saves the directories of the disk tier in home, for `stepwell uninstall`. A home on a full disk keeps no well
    from serving."""
    try:
        remember(home, [place.path for place in settings.disk])
    except OSError as error:
        log.warning("`stepwell uninstall` may not find the disk tier: %s cannot be written: %s", home, error.strerror)


@contextlib.contextmanager
def _locked(home: Path, place: Rendezvous, inherited: int | None) -> Iterator[None]:
    if inherited is not None:
        try:
            yield
        finally:
            os.close(inherited)
        return
    with lock(place.lock) as taken:
        # The socket is asked as well: a clean-up of temporary folders may have removed the lock's file.
        if (pid := pid_at(place.socket)) is not None or taken is None:
            who = f"process {pid} listens at {place.socket}" if pid else f"another process holds {place.lock}"
            raise BackendDown(
                "SW-501",
                what=f"a well is already running for {home}, or at its socket",
                why=who,
                fix="use it, end it with `stepwell stop`, or set STEPWELL_HOME to another directory",
            )
        yield


def _metrics(address: str | None, home: Path, at: Path) -> contextlib.AbstractContextManager[object]:
    """Serves /metrics at `address`, if there is one. Raises ConfigError as `MetricsServer` says."""
    if address is None:
        return contextlib.nullcontext()
    from stepwell.serve.metrics.endpoint import MetricsServer  # only here: the HTTP machinery is not small

    return MetricsServer(address, home, at)


@contextlib.contextmanager
def _signals(loop: Loop, wakeup: Wakeup) -> Iterator[None]:
    before = {
        s: signal.signal(s, lambda number, _: loop.stop(signal.Signals(number).name))
        for s in (signal.SIGTERM, signal.SIGINT)
    }
    before[signal.SIGHUP] = signal.signal(signal.SIGHUP, _hang_up(loop))
    old_fd = signal.set_wakeup_fd(wakeup.signal_fd, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_fd)
        for number, handler in before.items():
            signal.signal(number, handler)


def _hang_up(loop: Loop) -> Callable[[int, object], None]:
    """The handler of SIGHUP. It has the settings read again, unless the signal comes because the terminal in which the
    well was started has closed: that ends the well, but not one that `nohup` started."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    terminal = None if ignored else next((fd for fd in (0, 1, 2) if os.isatty(fd)), None)

    def hung_up(number: int, _: object) -> None:
        if terminal is not None and not os.isatty(terminal):
            loop.stop("its terminal was closed")
        else:
            loop.reload()

    return hung_up


def _raise_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
