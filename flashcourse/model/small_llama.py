"""Small Llama models from a config: the one learnt in this course, and one for a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashcourse.model.transformers_attention import register_with_transformers


@dataclass(frozen=True)
class Size:
    """The shape of a model and of its training.

    Attributes:
        hidden, layers, heads, heads_kv, head_dim, feed_forward: of the model.
        vocab: tokens of its tokenizer.
        longest: tokens a document is cut to.
        documents: how many documents to learn from; None: the whole standard library.
        batch: documents a step.
        steps: of training.
        learning_rate: at its peak.
    """

    hidden: int
    layers: int
    heads: int
    heads_kv: int
    head_dim: int
    feed_forward: int
    vocab: int
    longest: int
    documents: int | None
    batch: int
    steps: int
    learning_rate: float


SIZES = {
    # A CPU trains this in seconds; Triton's interpreter runs it, slowly.
    "tiny": Size(64, 2, 4, 2, 16, 128, 512, 64, 400, 4, 60, 3e-3),
    # About 16 million parameters: minutes on a GPU.
    "small": Size(384, 8, 6, 2, 64, 1024, 8192, 1024, None, 64, 700, 1e-3),
    # About 100 million: large enough that a step's time is the GPU's and not Python's.
    "base": Size(768, 12, 12, 4, 64, 2560, 8192, 512, None, 64, 1500, 6e-4),
}


def size_named(name: str) -> Size:
    """The size called ``name``.

    Raises:
        ValueError: there is none; the message lists them.
    """
    if name not in SIZES:
        raise ValueError(f"there is no size {name!r}; there are {', '.join(SIZES)}")
    return SIZES[name]


def small_llama(size: str | Size, *, attention: str = "flashcourse", seed: int = 0) -> Any:
    """A Llama with random weights, in float32 on the CPU; the same weights for the same seed.

    Args:
        size: "tiny", "small", "base", or a :class:`Size` of your own.
        attention: Transformers' ``attn_implementation``.
        seed: of the weights.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    register_with_transformers()
    size = size_named(size) if isinstance(size, str) else size
    options: dict[str, Any] = {"attn_implementation": attention}
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.feed_forward,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads_kv,
        head_dim=size.head_dim,
        max_position_embeddings=max(2048, size.longest),
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    torch.random.set_rng_state(state)
    return model


def count_parameters(model: Any) -> int:
    """Numbers that are learnt; tied ones count once."""
    return sum(p.numel() for p in model.parameters())
