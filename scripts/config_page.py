"""Writes docs/configuration.md from the settings themselves; `--check` says whether it is the same."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from stepwell.config import Settings, allowed, texts
from stepwell.config.reread import FIXED, LIVE

PAGE = Path(__file__).resolve().parents[1] / "docs/configuration.md"
HEAD = """\
<!-- made by scripts/config_page.py -->

# Configuration

A well reads its settings when it starts, and again on SIGHUP and `stepwell reload`. The places, of which the last one
wins:

1. the defaults below;
2. one YAML file: `--config FILE`, else `$STEPWELL_CONFIG`, else `stepwell.yaml` in the well's home;
3. environment variables: `STEPWELL_` and the name in capitals;
4. options of the command, or, for a well that an engine starts, the keys of `kv_connector_extra_config` that are not
   the connector's own (`home`, `socket`, `strict`, `block_tokens`, `weights_id`, `canary`, `receipts`).

A name or value that is not understood is an error that names its place ([codes](errors.md)). A well that runs already
keeps its settings: an engine that asks for others gets one warning, SW-111. `stepwell config show --origin` prints each
value and where it comes from, `stepwell config check` says whether all can be used, and `stepwell doctor` whether this
machine can do what they ask for.

Settings marked "read again" are in force as soon as a running well has read them. It says in one line which have
changed, and which of the changed ones need a restart. A file that cannot be used changes nothing, and the well says
why. The environment and the options are those that the well was started with.

```yaml
# stepwell.yaml
host: 25%
disk:
  - /nvme0/stepwell:400GiB
  - /nvme1/stepwell:60%
metrics: 127.0.0.1:9464
```

```yaml
# one well for several tenants: operations.md says what that means
socket: /run/stepwell/well.sock
tenants:
  alice: {uids: [1001]}
  batch: {socket: /run/stepwell-batch/well.sock, uids: [1002, 1003]}
```

How values are written: a *size* is a number and a unit (`KiB MiB GiB TiB` are powers of 1024, `KB MB GB TB` powers of
1000, a bare letter is binary) or a number of bytes; a *per cent* is `25%`; a *duration* is a number of seconds or has
one of `us ms s m h d`. In the environment and in a command a list is one text with commas between.

## Settings
"""
TAIL = """
## Variables that are no settings

`STEPWELL_HOME` names the well's home, `STEPWELL_CONFIG` its settings file, and `STEPWELL_DEBUG` makes a command show
its traceback.
"""


def page() -> str:
    properties = Settings.model_json_schema()["properties"]
    defaults = texts(Settings())
    parts = [HEAD]
    for name, schema in properties.items():
        parts.append(
            f"\n### `{name}`\n\n{_capital(schema['description'])}.\n\n{_capital(allowed(schema))}; "
            f"default: {_default(defaults[name])}; environment: {_variable(name, schema)}\n\n{_reread(name)}\n"
        )
    return "".join([*parts, TAIL])


def _reread(name: str) -> str:
    return f"Read again: {LIVE[name]}." if name in LIVE else f"Needs a restart: {FIXED[name]}."


def _capital(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"


def _variable(name: str, schema: dict[str, Any]) -> str:
    within = "__NAME__UIDS` and so on" if schema.get("type") == "object" else "`"
    return f"`STEPWELL_{name.upper()}{within}"


def _default(text: str) -> str:
    return text if text in ("unset", "none") else f"`{text}`"


def main() -> int:
    new = page()
    if "--check" in sys.argv:
        same = PAGE.exists() and PAGE.read_text() == new
        if not same:
            print("docs/configuration.md is not that of the settings: run scripts/config_page.py")
        return int(not same)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
