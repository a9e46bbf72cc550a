"""The commands as `stepwell --help` lists them, by what a person wants to do; and their old spellings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperGroup

from stepwell import renamed

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "Use it": ("vllm-args", "serve", "stop", "pause", "resume", "reload", "config"),
    "See what it does": ("stats", "explain", "doctor", "cache"),
    "Try it out": ("demo", "simulate", "simulate-fleet", "fidelity", "indexes"),
    "Remove it": ("uninstall",),
}
"""All commands that are not hidden, each once."""


class SectionedGroup(TyperGroup):
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        wide = max(map(len, self.commands))
        for title, names in SECTIONS.items():
            with formatter.section(title):
                limit = formatter.width - 6 - wide
                formatter.write_dl(
                    [(f"{name:{wide}}", self.commands[name].get_short_help_str(limit)) for name in names]
                )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        for words in (1, 2):
            if new := renamed.COMMANDS.get(old := " ".join(args[:words])):
                typer.echo(f"stepwell: `stepwell {old}` is `stepwell {' '.join(new)}` now, with the same options; "
                           "the old spelling goes with the next version", err=True)  # fmt: skip
                return super().resolve_command(ctx, [*new, *args[words:]])
        if args[0] == "bench":
            ctx.fail(renamed.NO_BENCH)
        return super().resolve_command(ctx, args)
