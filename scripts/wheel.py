"""Build the wheel, see that it holds the product alone, install it into an empty folder and import it from there, with
every entry point it names.

What an editable install hides shows here: a file that the wheel leaves out, an entry point to nowhere, an import of the
lab.
Needs no network: the build uses this environment's hatchling, the import its dependencies.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SMOKE = """
import importlib
import pkgutil
import sys
from importlib import metadata, resources
from pathlib import Path

import stepwell

assert Path(stepwell.__file__).is_relative_to(sys.argv[1]), stepwell.__file__
assert resources.files(stepwell).joinpath("py.typed").is_file()
(found,) = metadata.distributions(name="stepwell", path=[sys.argv[1]])
assert found.version == stepwell.__version__, (found.version, stepwell.__version__)
for module in pkgutil.walk_packages(stepwell.__path__, "stepwell.", onerror=lambda name: None):
    if module.ispkg and not module.name.startswith(("stepwell.engines", "stepwell.testing")):
        importlib.import_module(module.name)
assert not [name for name in sys.modules if name.split(".")[0] == "lab"]
for point in found.entry_points:
    assert callable(point.load()), point
print(f"wheel: stepwell {found.version} imports from the wheel, {len(found.entry_points)} entry points load")
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        site = Path(scratch, "site")
        build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", scratch, str(ROOT)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as held:
            tops = {name.split("/")[0] for name in held.namelist()}
        if strange := {top for top in tops if top != "stepwell" and not top.endswith(".dist-info")}:
            raise SystemExit(f"the wheel holds more than the product: {', '.join(sorted(strange))}")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
        subprocess.run([*pip, str(wheel)], check=True)
        environment = {**os.environ, "PYTHONPATH": str(site)}
        subprocess.run([sys.executable, "-c", SMOKE, str(site)], check=True, cwd=scratch, env=environment)


if __name__ == "__main__":
    main()
