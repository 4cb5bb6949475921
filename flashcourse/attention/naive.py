"""Attention as the textbook writes it: the whole score matrix, one operation after the other.

This is the specification that every faster version is compared with.
Vaswani et al. (2017), "Attention Is All You Need", section 3.2.1.
"""

from __future__ import annotations

import torch

from flashcourse.attention.arguments import HALF_AND_SINGLE, check_dense, resolve_options
from flashcourse.attention.visibility import visible_keys

DTYPES = (*HALF_AND_SINGLE, torch.float64)


def naive_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale · q kᵀ) v with the ``seq_q × seq_k`` matrix held in memory.

    Scores and sums are float32 (float64 for float64 inputs, which the other functions do not
    take: with them this is the reference of the accuracy rule). Differentiable by autograd.

    Args:
        q: ``(batch, heads_q, seq_q, head_dim)``, float16, bfloat16, float32 or float64.
        k, v: ``(batch, heads_kv, seq_k, head_dim)``; query head ``h`` reads KV head
            ``h // (heads_q // heads_kv)``.
        is_causal: query ``i`` sees key ``j`` when ``j <= i + seq_k - seq_q``.
        scale: factor of the scores; default ``head_dim ** -0.5``.
        window_size: keys to the (left, right) of the diagonal that stay visible; -1 or None is
            unlimited.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None is off.
        return_lse: also return the log-sum-exp of each row's scores.

    Returns:
        out with q's shape and dtype; with ``return_lse`` also lse, ``(batch, heads_q, seq_q)``,
        float32 (float64 for float64 inputs), natural logarithm. A row that sees no key gives
        out 0 and lse ``-inf``.

    Raises:
        TypeError, ValueError: an argument is not what it must be; the message says which.
    """
    check_dense(q, k, v, DTYPES)
    options = resolve_options(
        q.shape[-1],
        is_causal=is_causal,
        scale=scale,
        window_size=window_size,
        softcap=softcap,
        return_lse=return_lse,
    )
    group = q.shape[1] // k.shape[1]
    seq_q, seq_k = q.shape[2], k.shape[2]
    accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
    queries = q.to(accumulate)
    keys = k.to(accumulate).repeat_interleave(group, dim=1)  # (batch, heads_q, seq_k, head_dim)
    values = v.to(accumulate).repeat_interleave(group, dim=1)

    s = queries @ keys.transpose(-2, -1) * options.scale  # (batch, heads_q, seq_q, seq_k)
    if options.softcap is not None:
        s = options.softcap * torch.tanh(s / options.softcap)
    if options.masked:
        rows = torch.arange(seq_q, device=q.device)
        columns = torch.arange(seq_k, device=q.device)
        s = s.masked_fill(~visible_keys(rows, columns, seq_q, seq_k, options), float("-inf"))

    m = row_max(s)  # (batch, heads_q, seq_q, 1)
    p = torch.exp(s - m)
    l = p.sum(dim=-1, keepdim=True)
    safe_l = torch.where(l == 0, 1.0, l)  # a row that sees no key: 0 / 1, not 0 / 0
    out = ((p / safe_l) @ values).to(q.dtype)
    if not return_lse:
        return out
    lse = torch.where(l == 0, float("-inf"), m + torch.log(safe_l))
    return out, lse.squeeze(-1)


def row_max(s: torch.Tensor) -> torch.Tensor:
    """The maximum of each row, kept as a dimension, 0 where the row has no visible score.

    It is only a pivot: any finite value gives the same softmax, so no gradient flows through it.
    A row whose scores are all -inf would make ``-inf - (-inf)``, which is NaN.
    """
    if s.shape[-1] == 0:
        return s.new_zeros((*s.shape[:-1], 1))
    m = s.detach().amax(dim=-1, keepdim=True)
    return torch.where(m == float("-inf"), 0.0, m)
