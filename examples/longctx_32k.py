"""A context of 32K tokens with 2K of them on the model's device.

    python examples/longctx_32k.py                       # SmolLM2-135M, as in the demo; on two cores this takes a while
    python examples/longctx_32k.py --tokens 6K --disk /nvme/kv:20GiB --model DIR

This is about machinery, not about answers: SmolLM2 was trained for 8K positions and makes no sense beyond. Give a model
of your own that was trained for more. The text is the source code of Python's standard library.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stepwell.demo.model import prepare
from stepwell.demo.progress import progress
from stepwell.longctx import attach
from stepwell.units import format_size, parse_size


def long_text(tokenizer, count: int) -> torch.Tensor:
    """[1, count] token ids."""
    ids: list[int] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        ids += tokenizer(path.read_text(errors="replace"), add_special_tokens=False)["input_ids"]
        if len(ids) >= count:
            return torch.tensor([ids[:count]])
    raise SystemExit(f"this Python's library has only {len(ids)} tokens")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face model folder; default: the demo's model")
    parser.add_argument("--tokens", default="32K", help="of the prompt (default: %(default)s)")
    parser.add_argument("--hot", default="2K", help="tokens on the model's device (default: %(default)s)")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate (default: %(default)s)")
    parser.add_argument("--policy", default="stepwell", help="see docs/longctx.md (default: %(default)s)")
    parser.add_argument("--host", default="256MiB", help="host memory for cold pages (default: %(default)s)")
    parser.add_argument("--disk", help="PATH:SIZE for those that do not fit there; default: a temporary folder")
    options = parser.parse_args(arguments)

    folder = prepare(options.model, progress())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = long_text(tokenizer, parse_size(options.tokens))

    with tempfile.TemporaryDirectory() as scratch:
        disk = options.disk or f"{scratch}:8GiB"
        hot = parse_size(options.hot)
        with attach(model, options.policy, hot_tokens=hot, host=options.host, disk=disk) as attached:
            cache = attached.new_cache()
            began = time.perf_counter()
            attached.prefill(ids, cache)
            prefilled = time.perf_counter()
            found = model.generate(ids, past_key_values=cache, max_new_tokens=options.new, do_sample=False)
            ended = time.perf_counter()
            cache.measure()
            told = cache.ledger.snapshot()
            cache.close()

    config = model.config
    size = config.head_dim if getattr(config, "head_dim", None) else config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * size * 4
    room = told["hot_bytes"] / token
    length, new = ids.shape[1], found.shape[1] - ids.shape[1]
    print(f"\n{folder.name}, float32, policy {options.policy}: {length:,} tokens, {new} generated\n")
    print(f"  all KV as float32       {format_size(length * token):>10}")
    print(f"  hot, at most {hot:>6,}     {format_size(told['hot_bytes']):>10}   room for {room:,.0f} tokens")
    print(f"  index, hot too          {format_size(told['index_bytes']):>10}")
    print(f"  cold in host memory     {format_size(told['host_bytes']):>10}   as the policy's codec packs it")
    print(f"  cold on disk            {format_size(told['disk_bytes']):>10}")
    print(f"  prefill                 {prefilled - began:>8.1f} s   {length / (prefilled - began):,.0f} tokens/s")
    print(f"  generation              {ended - prefilled:>8.1f} s   {(ended - prefilled) / new:.2f} s a token")
    print(f"  waited for pages        {told['stall_seconds']:>8.1f} s   of {told['fetch_seconds']:.1f} s of reading")
    print("\nThe ledger:\n")
    print(json.dumps(told, indent=2))
    print("\nWhat it wrote (see above: no sense is expected beyond what the model was trained for):\n")
    print(repr(tokenizer.decode(found[0, length:])))


if __name__ == "__main__":
    main()
