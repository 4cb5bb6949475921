"""Small Transformers models with the course's attention, and the same documents as batches."""

from __future__ import annotations

import inspect

import torch
from transformers import (
    DataCollatorWithFlattening,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
)

from flashcourse import runtime

DEVICE = runtime.device()
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
}
LENGTHS = (5, 1, 9, 3)
# The name of the argument; it changed in 5.24.
CACHE = (
    "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"
)


def make(kind="llama", implementation="flashcourse", **changes):
    """The same random weights for each implementation."""
    classes = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
        "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    }
    config_class, model_class = classes[kind]
    torch.manual_seed(7)
    config = config_class(**{**SIZES, **changes}, attn_implementation=implementation)
    model = model_class(config).to(DEVICE).eval()
    for parameter in model.parameters():  # large enough that attention is not flat
        if parameter.dim() == 2:
            parameter.data.mul_(6)
    assert model.config._attn_implementation == implementation
    return model


def draw(lengths=LENGTHS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 61, (n,), generator=generator).to(DEVICE) for n in lengths]


def alone(model, documents):
    """Logits of each document in a run of its own."""
    return [model(input_ids=d[None], use_cache=False).logits[0] for d in documents]


def packed(documents, **options):
    collator = DataCollatorWithFlattening(**options)
    batch = collator([{"input_ids": d.tolist()} for d in documents])
    return {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def padded(documents, side):
    longest = max(map(len, documents))
    ids = torch.zeros(len(documents), longest, dtype=torch.long, device=DEVICE)
    mask = torch.zeros_like(ids)
    for row, document in enumerate(documents):
        where = slice(longest - len(document), longest) if side == "left" else slice(len(document))
        ids[row, where], mask[row, where] = document, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return ids, mask, positions


# Both sides are float32; on a GPU their matrix products differ in the order of the sums as well.
TOLERANCE = 1e-5 if DEVICE.type == "cpu" else 1e-4


def close(actual, expected):
    assert actual.shape == expected.shape
    size = max(1.0, expected.abs().max().item())
    assert (actual - expected).abs().max().item() <= TOLERANCE * size


MODELS = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4, "attn_logit_softcapping": 5.0},
}
