"""Options of an engine whose well runs already: the well keeps its own settings, and the engine gets warnings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter

from stepwell.config.loader import from_overrides, merge
from stepwell.config.settings import Settings, texts
from stepwell.errors import ConfigError
from stepwell.units import Amount

ENGINE = "the engine's settings"
"""Where settings come from that an engine gives, in messages: each adapter has a place of its own for them."""

_PRIVATE = frozenset({"allow_uids", "tenants"})
"""Settings that no engine may know or give: they say who else is served."""

Judge = Callable[[Mapping[str, str | int | float]], list[str]]


def judge(settings: Settings, host: int | None = None) -> Judge:
    """A function from an engine's options to warnings, one for each that `settings` does not meet.

    `host` is the arena's size in bytes, where it is known: an engine that asks for just that gets no warning, however
    the well's own setting is written. The function raises ConfigError (SW-101, SW-102) for options that no well could
    meet.
    """
    in_force = settings if host is None else settings.model_copy(update={"host": Amount(size=host)})

    def warnings(options: Mapping[str, str | int | float]) -> list[str]:
        if private := sorted({name.partition(".")[0] for name in options} & _PRIVATE):
            raise ConfigError(
                "SW-102",
                what=f"{ENGINE}: {private[0]} is not for an engine to set",
                why="it decides who else may use the well",
                fix="write it into the well's stepwell.yaml",
            )
        loaded = merge(Settings, from_overrides(options, ENGINE))
        asked, ours, theirs = loaded.settings, texts(in_force), texts(loaded.settings)
        return [
            *loaded.warnings,
            *(
                f"the running well has {name} = {ours[name]}, not {theirs[name]} as asked for;"
                " `stepwell stop` ends it, and the next engine starts a new one [SW-111]"
                for name, of in ((name, attrgetter(name)) for name in sorted(options))
                if of(asked) not in (of(settings), of(in_force))
            ),
        ]

    return warnings
