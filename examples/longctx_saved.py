"""A prefilled context that is saved, opened by another process, and gone on with, without prefill.

    python examples/longctx_saved.py                     # does both, one after the other
    python examples/longctx_saved.py --open context.swc  # goes on with one that is there

The file is sealed with a key in stepwell's home and bound to the model: it opens with the same weights only, and not if
a bit of it has changed. Any policy can open it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stepwell.demo.model import prepare
from stepwell.demo.progress import progress
from stepwell.longctx import attach
from stepwell.units import parse_size

FIRST = "\n# What this module is for:"
NEXT = "\n# And the first of its functions:"


class Computed:
    """Counts the tokens that a model computes."""

    def __init__(self, model) -> None:
        self.tokens = 0
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module, args, kwargs) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        self.tokens += ids.shape[1]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face model folder; default: the demo's model")
    parser.add_argument("--tokens", default="3K", help="of the document (default: %(default)s)")
    parser.add_argument("--hot", default="1K", help="tokens on the model's device (default: %(default)s)")
    parser.add_argument("--file", type=Path, default=Path("context.swc"), help="default: %(default)s")
    parser.add_argument("--open", type=Path, metavar="FILE", help="go on with this one")
    options = parser.parse_args(arguments)

    folder = prepare(options.model, progress())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    computed = Computed(model)

    def ids_of(text: str) -> torch.Tensor:
        return torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])

    print("Another process:" if options.open else "A process:")
    with attach(model, "stepwell", hot_tokens=parse_size(options.hot)) as attached:
        began = time.perf_counter()
        if options.open:
            cache = attached.open(options.open)
            print(f"  opened {cache.tokens.shape[1]:,} tokens in {time.perf_counter() - began:.1f} s")
            prompt = torch.cat([cache.tokens, ids_of(NEXT)], 1)
        else:
            cache = attached.new_cache()
            document = ids_of(Path(argparse.__file__).read_text())[:, : parse_size(options.tokens)]
            prompt = torch.cat([document, ids_of(FIRST)], 1)
        known = cache.get_seq_length()
        began = time.perf_counter()
        found = model.generate(prompt, past_key_values=cache, max_new_tokens=12, do_sample=False)
        seconds = time.perf_counter() - began
        print(f"  prompt of {prompt.shape[1]:,} tokens, {known:,} of them in the cache")
        print(f"  computed {computed.tokens:,} tokens in {seconds:.1f} s")
        print(f"  answer: {tokenizer.decode(found[0, prompt.shape[1] :])!r}")
        if not options.open:
            began = time.perf_counter()
            attached.save(options.file, cache)
            size = options.file.stat().st_size / (1 << 20)
            print(f"  saved as {options.file}: {size:.0f} MiB in {time.perf_counter() - began:.1f} s")
        cache.close()

    if not options.open:
        sys.stdout.flush()
        again = [sys.executable, __file__, "--open", str(options.file), "--hot", options.hot]
        subprocess.run([*again, *(["--model", str(options.model)] if options.model else [])], check=True)


if __name__ == "__main__":
    main()
