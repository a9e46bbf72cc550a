"""`stepwell doctor`: can this machine do what the settings ask for? Every question is tried, not guessed, where it can.

It takes a few seconds, writes at most 64 MiB a directory into a file without a name, needs 64 MiB of shared memory for
a moment, which a GPU registers, and leaves nothing behind. A well that runs is asked for its state and otherwise left
alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from stepwell.config import Settings, check_together, load
from stepwell.errors import ConfigError
from stepwell.ops.checks import disk, gpu, memory, offloading, places
from stepwell.ops.checks.check import Check, failed, guarded


def examine(
    home: Path,
    env: Mapping[str, str],
    config: Path | None = None,
    options: Mapping[str, object] | None = None,
    cpu_bytes: int | None = None,
) -> Iterator[Check]:
    """All checks, yielded as they are done. Settings that cannot be used are one failed check; the others then run with
    the defaults, or, where settings contradict each other, with these settings. `cpu_bytes`: size of vLLM's own host
    memory, where the well is below vLLM's offloading."""
    settings = Settings()
    try:
        loaded = load(home, env, path=config, overrides=options)
        settings = loaded.settings
        check_together(settings)
        yield Check("settings", "ok", f"{len(settings.model_fields_set)} of them are set")
        for warning in loaded.warnings:
            yield Check("settings", "warn", warning, fix="write the new word")
    except ConfigError as error:
        yield failed("settings", error)
    held = 0

    def well() -> list[Check]:
        nonlocal held
        shared = bool(settings.allow_uids) or any(tenant.socket is None for tenant in settings.tenants.values())
        checks, held = places.well(home, settings.socket, shared=shared)
        return checks

    yield from guarded("home", lambda: places.home(home))
    yield from guarded("keyring", lambda: places.keyring(home))
    yield from guarded("runtime-directory", places.runtime)
    yield from guarded("well", well)
    yield from guarded("paused", lambda: places.paused(home, settings.socket))
    for name in settings.tenants:
        yield from guarded("tenant", partial(places.tenant, settings, name), name)
    yield from guarded("metrics", lambda: places.metrics(home, settings))
    yield from guarded("engine", places.engine)
    yield from guarded("engine-tiers", offloading.interface)
    if cpu_bytes is not None:
        yield from guarded("engine-memory", lambda: offloading.memory(settings, cpu_bytes, held))
    yield from guarded("engine-leftovers", offloading.leftovers)
    yield from guarded("memory", lambda: memory.host(settings, held))
    yield from guarded("shared-memory", memory.shared)
    yield from guarded("huge-pages", lambda: memory.huge_pages(settings))
    has = gpu.software()
    yield from guarded("limits", lambda: memory.limits(settings, gpu_engine=bool(has.for_gpu)))
    yield from guarded("locked-keys", memory.keys)
    yield from guarded("gpu", lambda: gpu.all_of(env, has))
    for place in settings.disk:
        yield from guarded("disk", partial(disk.all_of, settings, place, home), str(place.path))


def line(check: Check) -> str:
    """The check as one line for people."""
    about = f" {check.of}" if check.of else ""
    fix = f"  fix: {check.fix}" if check.fix else ""
    return " ".join(f"{check.status:4}  {check.name}{about}: {check.text}{fix}".split("\n"))


def summary(checks: list[Check]) -> str:
    """Number of checks by status."""
    counts = [sum(check.status == status for check in checks) for status in ("ok", "warn", "fail")]
    return "{} ok, {} warn, {} fail".format(*counts)


def shape(checks: list[Check]) -> dict[str, Any]:
    """Output of `--json`: {"ok": nothing failed, "checks": [{"check", "status", "text", "fix", "of", "facts"}]}."""
    rows = [
        {"check": c.name, "status": c.status, "text": c.text, "fix": c.fix, "of": c.of, "facts": dict(c.facts)}
        for c in checks
    ]
    return {"ok": all(check.status != "fail" for check in checks), "checks": rows}
