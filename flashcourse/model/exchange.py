"""One model, its attention exchanged: the ways that are compared, and a way that costs nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashcourse.attention import flash_attention
from flashcourse.model.transformers_attention import register_with_transformers

EAGER, MATH, DEFAULT, OURS = "eager", "SDPA math", "SDPA default", "flashcourse"
WAYS = (EAGER, MATH, DEFAULT, OURS)
NO_ATTENTION = "no attention"
_IMPLEMENTATIONS = {EAGER: "eager", MATH: "sdpa", DEFAULT: "sdpa", OURS: "flashcourse"}
_NOTHING, _WATCHED = "course_nothing", "course_watched"

Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v of one layer


@contextlib.contextmanager
def exchanged(model: Any, way: str) -> Iterator[Any]:
    """The model with another attention, for as long as the context lasts.

    Args:
        model: of Transformers.
        way: one of :data:`WAYS`, or :data:`NO_ATTENTION`: each token then gets its own value, so
            everything but attention is done and the result is meaningless. What such a model
            takes is what no attention kernel can save.

    Raises:
        ValueError: there is no such way.
    """
    if way not in (*WAYS, NO_ATTENTION):
        raise ValueError(f"way must be one of {(*WAYS, NO_ATTENTION)}, got {way!r}")
    register_with_transformers()
    _register(_NOTHING, _nothing)
    before = model.config._attn_implementation
    model.set_attn_implementation(_IMPLEMENTATIONS.get(way, _NOTHING))
    only = sdpa_kernel(SDPBackend.MATH) if way == MATH else contextlib.nullcontext()
    try:
        with only:
            yield model
    finally:
        model.set_attn_implementation(before)


def attention_alone(way: str) -> Callable[..., torch.Tensor]:
    """Causal attention ``(q, k, v) -> out`` as a model computes it this way, shapes as in SDPA's.

    Raises:
        ValueError: there is no such way.
    """
    if way == EAGER:
        return _plain
    if way == OURS:
        return lambda q, k, v: flash_attention(q, k, v, is_causal=True)  # type: ignore[return-value]
    if way == DEFAULT:
        return _sdpa
    if way == MATH:

        def math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(SDPBackend.MATH):
                return _sdpa(q, k, v)

        return math
    raise ValueError(f"way must be one of {WAYS}, got {way!r}")


@torch.no_grad()
def layer_inputs(model: Any, input_ids: torch.Tensor) -> list[Layer]:
    """q, k and v of every layer's attention, as this text makes them.

    Args:
        input_ids: int64 ``(batch, seq)``.

    Returns:
        For each layer q ``(batch, heads_q, seq, head_dim)`` and k, v ``(batch, heads_kv, …)``.
    """
    layers: list[Layer] = []

    def watch(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        layers.append((query, key, value))
        return _sdpa(query, key, value).transpose(1, 2).contiguous(), None

    _register(_WATCHED, watch)
    before = model.config._attn_implementation
    model.set_attn_implementation(_WATCHED)
    try:
        model(input_ids=input_ids, use_cache=False)
    finally:
        model.set_attn_implementation(before)
    return layers


def _register(name: str, function: Callable[..., Any]) -> None:
    import transformers

    transformers.AttentionInterface.register(name, function)


def _nothing(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    group = query.shape[1] // value.shape[1]
    newest = value[:, :, -query.shape[2] :]  # with a cache there are more values than queries
    return newest.repeat_interleave(group, dim=1).transpose(1, 2).contiguous(), None


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The unfused way in the order in which Transformers does it: softmax in float32."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5  # (batch, heads_q, seq, seq)
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(hidden, torch.finfo(q.dtype).min)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.softmax(scores, dim=-1, dtype=wide).to(q.dtype) @ v
