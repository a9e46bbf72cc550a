"""A small engine on paged KV, for tests and measurements.

kv         tensors in vLLM's layouts            serving        both halves over a real well, in vLLM's order
attention  over pages, in plain torch           halves         what joins the well
model      Llama-shaped, dummy weights          request, pool  what vLLM's scheduler would have
decoder    a batch, in a CUDA graph             compute        model, hashes to check, or nothing
"""

from __future__ import annotations
