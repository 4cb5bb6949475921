"""A byte-level BPE tokenizer, trained in seconds on the corpus at hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
SMALLEST_VOCABULARY = 256 + 3


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> Any:
    """Train a tokenizer that can write any text: what it has no token for, it writes in bytes.

    Args:
        documents: what to count pairs in.
        vocab_size: tokens in all, 259 (bytes and three special tokens) or more.

    Returns:
        A ``PreTrainedTokenizerFast``; ``<pad>``, ``<bos>`` and ``<eos>`` are 0, 1 and 2.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocab_size must be {SMALLEST_VOCABULARY} or more (256 bytes, 3 special tokens), "
            f"got {vocab_size}"
        )
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: Any, documents: list[str], longest: int) -> list[list[int]]:
    """Each document as ``<bos>`` tokens ``<eos>``, cut to ``longest`` tokens.

    A document that is cut keeps no ``<eos>``: it did not end there.
    """
    if longest < 2:
        raise ValueError(f"longest must be 2 or more, got {longest}")
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    texts = tokenizer(documents, add_special_tokens=False)["input_ids"]
    return [[bos, *ids, eos][:longest] for ids in texts]
