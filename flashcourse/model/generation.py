"""Calling a Transformers model with a KV cache, whatever its version calls that argument."""

from __future__ import annotations

import inspect
from typing import Any

import torch


def cache_keyword(model: Any) -> str:
    """The name of the cache argument of ``model.forward``.

    Transformers 5.24 renamed ``past_key_values`` to ``cache``.
    """
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def new_cache(model: Any) -> Any:
    """An empty ``DynamicCache`` for this model; its config tells it of a sliding window."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def run_with_cache(model: Any, input_ids: torch.Tensor, cache: Any, **more: Any) -> torch.Tensor:
    """Logits ``(batch, seq, vocab)`` of new tokens; their keys and values join the cache.

    Args:
        model: a causal language model of Transformers.
        input_ids: int64 ``(batch, seq)``, only the tokens the cache does not hold yet.
        cache: a cache of Transformers. It is changed.
        more: further arguments of ``model.forward``, such as ``logits_to_keep``.
    """
    return model(
        input_ids=input_ids, use_cache=True, **{cache_keyword(model): cache}, **more
    ).logits
