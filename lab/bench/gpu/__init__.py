"""A small engine on paged KV, for tests and measurements on a GPU where vLLM cannot be had; and the measurements.

kv         tensors in vLLM's layouts            engine         both halves over a real well, in vLLM's order
attention  over pages, in plain torch           halves         what joins the well
model      Llama-shaped, dummy weights          request, pool  what vLLM's scheduler would have
decoder    a batch, in a CUDA graph             compute        model, hashes to check, or nothing

`benchmarks/gpu.py` runs `copies`, `interference` and `recall`. With the device "cpu" all of it runs in a tiny shape: it
shows that the code works, and measures nothing.
"""

from __future__ import annotations
