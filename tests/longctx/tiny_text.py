"""A tokenizer made here, so that no test needs a model's: letters and digits one by one, some words whole."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from stepwell.fidelity.text import Text

BOS = "<s>"


def tiny_text(bos: bool = False) -> Text:
    return Text(tiny_tokenizer(bos))


def tiny_tokenizer(bos: bool = False) -> Tokenizer:
    """Byte-level, without merges: every byte is a token, so no text is unknown."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([BOS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return tokenizer


VOCABULARY = 257
