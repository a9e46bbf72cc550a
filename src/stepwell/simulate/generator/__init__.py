"""Traces that are made, not recorded: by name, parameters and seed, the same every time.

`GENERATORS` has each one's parameters; tests, tuning and anyone without recordings use them.
"""

from __future__ import annotations

from stepwell.simulate.formats.form import DEFAULT_BLOCK, TraceOptions, in_vain
from stepwell.simulate.generator.agentic import Agentic
from stepwell.simulate.generator.parameters import parsed
from stepwell.simulate.generator.popularity import Churn, Cyclic, Scan, Zipf
from stepwell.simulate.traces.assemble import assemble
from stepwell.simulate.traces.problems import Problems
from stepwell.simulate.traces.trace import Trace

GENERATORS: dict[str, type[Agentic | Churn | Cyclic | Scan | Zipf]] = {
    "agentic": Agentic,
    "churn": Churn,
    "cyclic": Cyclic,
    "scan": Scan,
    "zipf": Zipf,
}


def make(source: str, wishes: TraceOptions, problems: Problems) -> Trace:
    """The trace of `name` or `name:parameter=value,...`. An `open` in it goes before the wished one.

    Raises ConfigError: SW-121 for a parameter that does not exist, SW-122 for a value that cannot be used."""
    name, _, text = source.partition(":")
    kind = GENERATORS[name]
    if kind is not Agentic:
        in_vain(wishes, problems, f"{name} has no conversations")
    elif "open=" in text:
        in_vain(wishes, problems, "the name sets it")
    elif wishes.open_ is not None:
        source = f"{name}:{','.join(filter(None, [text, f'open={wishes.open_}']))}"
        text = source.partition(":")[2]
    block = wishes.block_tokens or DEFAULT_BLOCK
    made = parsed(kind, text).made(block)
    return assemble(source, block, made.columns, made.blocks, problems)
