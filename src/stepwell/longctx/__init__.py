"""Contexts beyond the GPU: decode-time tiering of the KV cache in Hugging Face transformers.

Pages of KV step down from the model's device to host memory and an unlinked file, and step up again when a policy
selects them. EXACT streams all of them and is equal to full attention up to rounding; VERIFIED drafts with a sparse
policy and checks in exact passes; SPARSE policies attend over what they select. docs/longctx.md tells how to use it,
docs/design/longctx.md how it works.
"""
