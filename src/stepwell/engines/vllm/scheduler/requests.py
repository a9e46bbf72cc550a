"""What vLLM's requests say that concerns stepwell."""

from __future__ import annotations

from typing import Any


def foreign_input(request: Any) -> str:
    """The name of an input that shapes the KV and that the digest does not know, or "". Adapters it may know."""
    if request.mm_features:
        return "multimodal"
    if request.prompt_embeds is not None:
        return "prompt_embeds"
    if getattr(request, "resumable", False):
        return "streamed_prompt"  # its tokens are not only appended to
    return ""


def recall_wish(request: Any) -> str:
    """How this request wants it: `{"stepwell": {"recall": "default", "always" or "never"}}` in its
    `kv_transfer_params`. Anything else is as if nothing was said."""
    params = getattr(request, "kv_transfer_params", None)
    ours = params.get("stepwell") if isinstance(params, dict) else None
    wish = ours.get("recall") if isinstance(ours, dict) else None
    return wish if isinstance(wish, str) and len(wish) <= len("default") else ""
