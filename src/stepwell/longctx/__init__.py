"""Contexts beyond the GPU: decode-time tiering of the KV cache in Hugging Face transformers.

    with stepwell.longctx.attach(model, policy="stepwell", hot_tokens=2048, host="16GiB", disk="/nvme/kv:200GiB"):
        model.generate(...)

Pages of KV step down from the model's device to host memory and an unlinked file, and step up again when a policy
selects them. EXACT streams all of them and is equal to full attention up to rounding; VERIFIED drafts with a sparse
policy and checks in exact passes; SPARSE policies attend over what they select. docs/longctx.md tells how to use it,
docs/design/longctx.md how it works.
"""

from __future__ import annotations

from stepwell.errors import ConfigError

try:
    from stepwell.longctx import policies
    from stepwell.longctx.attach import Attached, attach
    from stepwell.longctx.ledger import prometheus
    from stepwell.longctx.model.cache import TieredCache
    from stepwell.longctx.policy import AttentionMode, Policy
except ImportError as error:
    if (error.name or "").partition(".")[0] not in ("torch", "transformers"):
        raise
    raise ConfigError(
        "SW-113",
        what="stepwell.longctx needs torch, and transformers 5.17 or newer",
        why=f"{error}",
        fix="pip install 'torch>=2.6' 'transformers>=5.17', or the extra `transformers` of stepwell",
    ) from error

__all__ = ["Attached", "AttentionMode", "Policy", "TieredCache", "attach", "policies", "prometheus"]
